"""`kvrepro generate` on a user's own text: several methods side by side, and the heat map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrepro import generate
from kvrepro.cli import main
from kvrepro.errors import UserError
from kvrepro.methods import Budget

TEXT = (
    "The warehouse holds crates of oranges & <b>lemons</b>. " * 12
    + "The magic number is 7361942. It rained. " * 2
)
QUESTION = "What is the magic number?"


@pytest.fixture(scope="module")
def asked() -> generate.Asked:
    return generate.ask("smollm2-135m", TEXT + "\n\n", f" {QUESTION}\n", max_new_tokens=12, dtype="float32")


@pytest.fixture(scope="module")
def found(asked: generate.Asked) -> dict[str, Any]:
    return generate.compare(asked, ["selkv", "kvslimmer", "snapkv", "selkv"], retain=0.3)


def test_the_question_stands_behind_the_text(asked: generate.Asked) -> None:
    assert f"It rained.\n\n{QUESTION}<|im_end|>" in asked.tokenizer.decode(asked.ids[0])


def test_the_full_cache_runs_along_and_is_at_no_distance_from_itself(found: dict[str, Any]) -> None:
    full, *others = found["methods"]
    assert [row["method"] for row in found["methods"]] == ["full", "selkv", "kvslimmer", "snapkv"]
    assert full["agree"] == 1 and full["kl"] == 0 and full["seconds_compress"] == 0
    assert "7361942" in full["answer"]
    for row in others:
        assert 0 <= row["agree"] <= 1 and row["kl"] > 0 and row["seconds_compress"] > 0
        assert row["compared_tokens"] == full["new_tokens"]
    assert [row["shared"] for row in found["methods"]] == [True, True, False, True]


@pytest.mark.parametrize("method", ["full", "selkv", "kvslimmer"])
def test_side_by_side_each_answers_as_it_does_alone(
    asked: generate.Asked, found: dict[str, Any], method: str
) -> None:
    row = next(row for row in found["methods"] if row["method"] == method)
    alone = generate.generate(asked, method, retain=1.0 if method == "full" else 0.3)
    for key in ("answer", "new_tokens"):
        assert row[key] == alone[key]
    for one, other in zip(row["layers"], alone["layers"], strict=True):
        for key in ("entries", "m", "bytes_used", "seen"):
            assert one[key] == other[key]


def test_distances_are_those_of_the_plain_forward_pass(asked: generate.Asked, found: dict[str, Any]) -> None:
    """Along the full cache's answer, token by token through the cache that stays as it is."""
    full = generate.generate(asked, "full")
    model, n = asked.model, asked.ids.shape[1]
    text_ids = model.generate(asked.ids, attention_mask=torch.ones_like(asked.ids), max_new_tokens=12,
                              cache=generate.make_cache(model, "full"))  # fmt: skip
    answer = text_ids[0, n:]
    assert len(answer) == full["new_tokens"]

    def predictions(method: str) -> torch.Tensor:
        cache = generate.make_cache(model, method, retain=1.0 if method == "full" else 0.3)
        with torch.no_grad():
            logits = [model(asked.ids, cache=cache).logits[0, -1]]
            logits += [model(token[None, None], cache=cache).logits[0, -1] for token in answer[:-1]]
        return torch.stack(logits).log_softmax(-1)

    true = predictions("full")
    for method in ("selkv", "snapkv"):
        row, other = next(row for row in found["methods"] if row["method"] == method), predictions(method)
        assert row["kl"] == pytest.approx(float((true.exp() * (true - other)).sum(-1).mean()), rel=1e-3)
        assert row["agree"] == pytest.approx(float((other.argmax(-1) == answer).float().mean()))


def test_a_number_of_entries_is_met(asked: generate.Asked) -> None:
    n = asked.ids.shape[1]
    rows = generate.compare(asked, ["snapkv", "full"], budget=50)["methods"]
    assert [row["method"] for row in rows] == ["snapkv", "full"]
    assert {line["m"] for line in rows[0]["layers"]} == {50}
    assert {line["entries"] for line in rows[1]["layers"]} == {n + rows[1]["new_tokens"] - 1}
    assert all(
        Budget(min(1.0, b / n)).resolve(n) == min(b, n) for n in range(1, 300) for b in range(1, n + 5)
    )


def test_answers_and_the_table_are_printed(found: dict[str, Any]) -> None:
    shown = generate.side_by_side(found)
    for row in found["methods"]:
        assert row["answer"].strip() in shown and f"{row['kl']:.3f}" in shown
    assert shown.index("KVSlimmer\n") < shown.index("agrees")
    table = generate.table(found)
    assert list(table.index) == ["full cache", "SelKV", "KVSlimmer", "SnapKV"]
    assert (
        table.loc["full cache", "agrees"]
        == f"{found['methods'][0]['new_tokens']} of {found['methods'][0]['new_tokens']}"
    )


def test_the_heat_map_shows_what_the_caches_held(asked: generate.Asked, found: dict[str, Any]) -> None:
    answers = {row["method"]: row["answer"] for row in found["methods"]}
    page = generate.heatmap(asked, ["full", "selkv", "snapkv"], retain=0.3, answers=answers)
    n = asked.ids.shape[1]
    assert page.count("<section") == 2  # the full cache keeps everything
    assert page.count("title=") == 2 * n
    assert "<b>" not in page
    assert "kept 30%, merged 0%, dropped 70%" in page
    assert generate.heatmap(asked, ["full"]).count("title=") == n


def test_from_the_shell(capsys: Any, tmp_path: Path) -> None:
    prompt, page = tmp_path / "notes.txt", tmp_path / "notes.html"
    prompt.write_text(TEXT)
    words = ["generate", "--prompt-file", str(prompt), "--question", QUESTION, "--max-new-tokens", "4"]
    assert main([*words, "--method", "selkv,snapkv", "--heatmap", str(page)]) == 0
    out = capsys.readouterr().out
    assert "SelKV" in out and "full cache" in out and out.strip().endswith(str(page))
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main([*words, "--method", "snapkv", "--json", "--heatmap", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "snapkv" and found["heatmap"] == str(page) and "methods" not in found
    assert main([*words, "--method", "full, snapkv", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["methods"]) == 2


@pytest.mark.parametrize(("words", "said"), [
    (["--method", "selkv,nope"], "unknown method 'nope'"),
    (["--method", ","], "--method names none"),
    (["--retain", "0.5", "--budget", "5"], "not both"),
    (["--retain", "nan"], "not a share"),
    (["--budget", "0"], "not a number of entries"),
    (["--question", "  "], "the question is empty"),
    (["--heatmap", "no/such/folder/x.html"], "no file in a folder that exists"),
    (["--heatmap", "."], "no file in a folder that exists"),
    (["--max-new-tokens", "0"], "leaves no answer"),
])  # fmt: skip
def test_bad_input_is_said_before_a_model_is_loaded(
    capsys: Any, tmp_path: Path, monkeypatch: Any, words: list[str], said: str
) -> None:
    prompt = tmp_path / "notes.txt"
    prompt.write_text(TEXT)

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(generate, "load", load)
    assert main(["generate", "--prompt-file", str(prompt), *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("kvrepro: ") and err.count("\n") == 1 and said in err


def test_an_empty_text_is_refused_also_with_a_question() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        generate.ask("smollm2-135m", " \n", QUESTION)
