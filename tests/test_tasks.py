"""The offline tasks: exact golds, lengths, determinism, the manifest, all checked on the samples themselves."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvrepro import tasks
from kvrepro.errors import UserError
from kvrepro.tasks import CATEGORIES, Sample, corpus, manifest, metrics, needle, prompts, pydoc

NAMES = tuple(pydoc.BUILDERS)
CONTEXTS = (1024, 8192)


@pytest.fixture(scope="module", params=CONTEXTS)
def samples(request: pytest.FixtureRequest) -> dict[str, list[Sample]]:
    """Twelve samples of each task, short and long."""
    return {name: tasks.load(name, 12, request.param) for name in NAMES}


def question(sample: Sample, marker: str) -> str:
    """What stands after the context."""
    return sample.prompt[sample.prompt.rindex(marker) :]


# What is there ----------------------------------------------------------------------------------------------


def test_every_category_has_a_task() -> None:
    assert set(tasks.available().values()) == set(CATEGORIES)
    assert {name for name in tasks.available() if not name.startswith("ruler-made/")} == set(NAMES)


def test_samples_are_well_formed(samples: dict[str, list[Sample]]) -> None:
    for name, drawn in samples.items():
        assert len({s.prompt for s in drawn}) == len(drawn)
        for i, sample in enumerate(drawn):
            assert re.fullmatch(rf"{name}/\d+/{i:04d}", sample.id)
            assert sample.task == name
            assert sample.category == tasks.available()[name]
            assert sample.metric in metrics.METRICS
            assert sample.answers[0].strip()
            assert sample.chat == (sample.category not in ("few-shot", "code"))
            assert sample.first_line == (sample.category == "few-shot")


def test_gold_answers_score_100_and_empty_ones_0(samples: dict[str, list[Sample]]) -> None:
    for drawn in samples.values():
        for sample in drawn:
            assert metrics.score(sample, sample.answers[0] + "\nand more" * sample.first_line) > 99.9
            assert metrics.score(sample, "") == 0


def test_bad_requests_are_refused() -> None:
    with pytest.raises(UserError, match="unknown task 'pydoc'"):
        tasks.load("pydoc", 1)
    with pytest.raises(UserError, match="limit 0"):
        tasks.load("pydoc-code", 0)
    for context in (1023, 8193):
        with pytest.raises(UserError, match=f"context {context}"):
            tasks.load("pydoc-code", 1, context)


# The same everywhere ----------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_the_others() -> None:
    for name in NAMES:
        assert tasks.load(name, 3)[2] == pydoc.build(name, 2048, 2)


def test_another_process_draws_the_same() -> None:
    """Hash randomisation and what was built before leave no trace; the manifest's hashes come from yet another run."""
    code = (
        "from kvrepro.tasks import manifest, pydoc\n"
        "for name in reversed(list(pydoc.BUILDERS)):\n"
        "    print(name, manifest.short_hash(pydoc.build(name, 1024, 63)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    recorded = manifest.read()["samples"]
    assert dict(line.split() for line in ran.stdout.splitlines()) == {
        name: recorded[name]["1024"].split()[63] for name in NAMES
    }


def test_lengths_with_smollm2(smollm2: tuple[Any, Any], samples: dict[str, list[Sample]]) -> None:
    """At most the context, chat template included, and at least three quarters of it."""
    for drawn in samples.values():
        for sample in drawn:
            context = int(sample.id.split("/")[1])
            encoded = prompts.encode(smollm2[1], sample, context)
            assert not encoded.truncated
            assert 0.75 * context <= len(encoded.input_ids) <= context, sample.id


def test_answers_are_several_tokens(smollm2: tuple[Any, Any], samples: dict[str, list[Sample]]) -> None:
    """Teacher-forced measures need more than one token to look at."""
    for drawn in samples.values():
        for sample in drawn:
            assert len(smollm2[1](sample.answers[0])["input_ids"]) >= 3
            assert len(smollm2[1](sample.answers[0])["input_ids"]) <= sample.max_new_tokens


# Exact golds ------------------------------------------------------------------------------------------------


def test_names_and_defaults_are_those_of_the_imported_packages() -> None:
    """The corpus is read without importing anything; Python itself is the judge here."""
    for entry in corpus.entries():
        owner: Any = None
        path = entry.name.split(".")
        for end in range(len(path) - 1, 0, -1):
            try:
                owner = importlib.import_module(".".join(path[:end]))
                break
            except ImportError:
                continue
        for part in path[end:]:
            owner = getattr(owner, part)
        parameters = inspect.signature(owner).parameters
        for name, value in entry.defaults:
            try:
                wanted = literal_eval(value)
            except ValueError:
                continue
            assert parameters[name].default == wanted, entry.name


def test_summaries_and_names_are_unambiguous() -> None:
    entries = corpus.entries()
    assert len(entries) > 1000
    assert len({e.name for e in entries}) == len(entries)
    assert len({corpus.normal(e.summary) for e in entries}) == len(entries)


def test_default_stands_once_on_the_page(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-default"]:
        parameter, value = sample.answers[0].split("=", 1)
        asked = question(sample, "Question:")
        assert f'parameter "{parameter}"' in asked
        assert value not in ("None", "True", "False", "0", "1", "-1")
        name = re.search(r'" of (\S+)\? Give', asked)
        assert name
        lines = [line for line in sample.prompt.split("\n") if sample.answers[0] in line]
        assert len(lines) == 1
        assert lines[0].startswith(f"{name[1]}(")


def test_hop_needs_the_summary_to_find_the_signature(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-hop"]:
        asked = question(sample, "Question:")
        quoted = re.search(r'documented as "(.*?)" What is the default value of its parameter "(\w+)"', asked)
        assert quoted
        summary, parameter = quoted.groups()
        passages = re.split(r"\n+Passage \d+:\n|\n\nAnswer the question", sample.prompt)
        described = [p for p in passages if f"\n{summary}\n" in p]
        assert len(described) == 1
        name = described[0].split("\n")[0].removeprefix("Documentation of ")
        signed = [p for p in passages if p.startswith(f"Signature\n{name}(")]
        assert len(signed) == 1
        assert sample.answers[0] in signed[0]
        assert sample.prompt.count(sample.answers[0]) == 1
        others = re.findall(
            rf"\b{parameter}=([^,)]+)", "".join(p for p in passages if p.startswith("Signature"))
        )
        assert len(set(others)) > 1  # the parameter's name alone does not tell


def test_summary_is_not_in_its_text(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-summary"]:
        assert corpus.normal(sample.answers[0]) not in corpus.normal(sample.prompt)
        name = re.search(r"write the summary line of (\S+):", corpus.flat(sample.prompt))
        assert name
        entry = next(e for e in corpus.entries() if e.name == name[1])
        assert entry.summary == sample.answers[0]
        assert entry.body in sample.prompt


def test_fewshot_asks_for_a_new_function_of_a_known_module(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-fewshot"]:
        shown = re.findall(r"^Function: (\S+)$", sample.prompt, re.MULTILINE)
        gold = sample.answers[0]
        assert gold not in sample.prompt
        assert sum(name.rsplit(".", 1)[0] == gold.rsplit(".", 1)[0] for name in shown) >= 5
        assert sample.prompt.endswith("\nFunction:")


def test_retrieval_points_at_the_right_paragraph(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-retrieval"]:
        summary = re.search(r"following is a summary\.\n\n(.*?)\n\nPlease enter", sample.prompt)
        assert summary
        assert corpus.normal(sample.prompt).count(corpus.normal(summary[1])) == 1
        entry = next(e for e in corpus.entries() if e.summary == summary[1])
        starts = re.findall(r"^(Paragraph \d+): (.*)$", sample.prompt, re.MULTILINE)
        assert [title for title, text in starts if text == entry.signature] == [sample.answers[0]]
        assert sample.prompt.startswith(f"Here are {len(starts)} paragraphs")


def test_count_counts_the_different_paragraphs(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-count"]:
        context = sample.prompt[: sample.prompt.rindex("\n\nPlease enter the final count")]
        paragraphs = re.split(r"\n\nParagraph \d+: ", context)[1:]
        assert sample.answers == (f"Unique paragraphs: {len(set(paragraphs))}",)


@pytest.mark.parametrize(("name", "hidden"), [("needle-single", 1), ("needle-multikey", 4)])
def test_needles(samples: dict[str, list[Sample]], name: str, hidden: int) -> None:
    for sample in samples[name]:
        needles = re.findall(r"magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.$", sample.prompt, re.MULTILINE)
        assert len(dict(needles)) == hidden
        key = re.search(r"special magic number for (\S+) mentioned", question(sample, "What is"))
        assert key
        assert sample.answers == (dict(needles)[key[1]],)
        assert sample.prompt.count(sample.answers[0]) == 1


def test_needles_lie_at_all_depths() -> None:
    drawn = [pydoc.build("needle-single", 2048, i) for i in range(64)]
    depths = [s.prompt.index(s.answers[0]) / len(s.prompt) for s in drawn]
    assert min(depths) < 0.2
    assert max(depths) > 0.8
    assert not any(key in text for text in corpus.prose() for key in needle.KEYS)


def test_code_line_follows_its_module_and_uses_what_is_shown(samples: dict[str, list[Sample]]) -> None:
    for sample in samples["pydoc-code"]:
        gold = sample.answers[0]
        assert gold.strip() not in sample.prompt
        assert sample.prompt.endswith("\nNext line of code:\n")
        *others, module = re.split(r"^# Path: ", sample.prompt, flags=re.MULTILINE)[1:]
        path, _, shown = module.removesuffix("Next line of code:\n").partition("\n")
        source = next(s for s in corpus.sources(path.split("/")[0]) if s.path == path)
        assert f"{shown}{gold}\n" in "\n".join(source.lines)
        defined = re.findall(r"^(?:def|class) (\w+)", "\n".join(others), re.MULTILINE)
        assert any(re.search(rf"\b{name}\b", gold) for name in defined), gold


# Pieces -----------------------------------------------------------------------------------------------------


def test_cut_keeps_whole_lines_and_no_dangling_heading() -> None:
    text = "one two\n\nReturns\n-------\nx : int\n    The number."
    assert corpus.cut(text, 1000) == text
    assert corpus.cut(text, corpus.size("one two") + 1) == "one two"
    assert corpus.cut(text, corpus.size("one two Returns") + 8) == "one two"
    assert corpus.cut(text, 0) == ""


def test_fill_skips_what_does_not_fit() -> None:
    assert corpus.fill(["w " * 30, "w " * 500, "w " * 40], 100, frame=0) == ["w " * 30, "w " * 40]


def test_count_is_bounded_by_its_room() -> None:
    drawn = pydoc.draw_count(corpus.entries()[0], Random(0), 1000)
    assert drawn is not None
    assert 800 < corpus.size(drawn[0]) < 1050


# The manifest -----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The manifest's content; `save` puts a changed copy in its place."""
    content = manifest.read()
    monkeypatch.setattr(manifest, "PATH", tmp_path / "pydoc_manifest.json")
    return content


def save(content: dict[str, Any]) -> None:
    manifest.PATH.write_text(json.dumps(content))


def test_manifest_covers_all_tasks_with_distinct_samples() -> None:
    content = manifest.read()
    assert tuple(content["packages"]) == corpus.PACKAGES
    assert tuple(content["samples"]) == NAMES
    for hashes in content["samples"].values():
        assert {context: len(set(h.split())) for context, h in hashes.items()} == {
            str(context): 64 for context in manifest.CONTEXTS
        }


def test_another_version_is_named(stored: dict[str, Any]) -> None:
    installed = stored["packages"]["scipy"]["version"]
    stored["packages"]["scipy"]["version"] = "1.0.0"
    save(stored)
    with pytest.raises(UserError, match=rf"scipy has version {installed}.* with 1\.0\.0.*scipy==1\.0\.0"):
        tasks.load("pydoc-code", 1)


def test_another_text_is_named(stored: dict[str, Any]) -> None:
    stored["packages"]["torch"]["sha256"] = "0" * 64
    save(stored)
    with pytest.raises(UserError, match=r"torch .* other source text .* reinstall it: .*torch=="):
        tasks.load("needle-single", 1)


def test_another_sample_is_named(stored: dict[str, Any]) -> None:
    hashes = stored["samples"]["pydoc-hop"]["2048"].split()
    stored["samples"]["pydoc-hop"]["2048"] = " ".join([*hashes[:1], "00000000", *hashes[2:]])
    save(stored)
    assert len(tasks.load("pydoc-hop", 1)) == 1
    with pytest.raises(UserError, match=r"pydoc-hop/2048/0001 .*--write-manifest"):
        tasks.load("pydoc-hop", 2)


def test_missing_manifest_is_one_clear_line(stored: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="missing") as error:
        tasks.load("pydoc-hop", 1)
    assert "\n" not in str(error.value)


def test_local_build_tags_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU and CUDA builds of torch differ in the version's local part only."""
    monkeypatch.setattr(corpus.importlib.metadata, "version", lambda package: "2.13.0+cu130")
    assert corpus.package_version("torch") == "2.13.0"


def test_write_records_what_load_accepts(stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CONTEXTS", (1024,))
    monkeypatch.setattr(manifest, "SAMPLES", 2)
    pydoc.main(["--write-manifest"])
    written = manifest.read()
    assert written["packages"] == stored["packages"]
    assert all(stored["samples"][name]["1024"].startswith(written["samples"][name]["1024"]) for name in NAMES)
    assert tasks.load("pydoc-default", 2, 1024)[1] == pydoc.build("pydoc-default", 1024, 1)
