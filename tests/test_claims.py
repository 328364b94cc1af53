"""Every claim is in the file, every verdict can come out, and nothing is judged without records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from kvrepro import claims, results, runner, stats
from kvrepro.claims import Claim, Comparison, Runs, Spectra, Untested, judge
from kvrepro.cli import main
from kvrepro.errors import UserError
from kvrepro.measure import asymmetry, readings
from kvrepro.studies import STUDIES
from kvrepro.tasks.base import CATEGORIES

ALL = claims.load()

# What the papers claim at the least: (id, arm, baseline) where records decide it, else its id alone.
LEAST = [
    ("selkv-closest-to-full", "selkv", "snapkv"), ("selkv-above-snapkv", "selkv", "snapkv"),
    ("selkv-above-look-m", "selkv", "look-m"), ("selkv-above-pyramidkv", "selkv", "pyramidkv"),
    ("selkv-above-full-multi-doc", "selkv", "full"), ("selkv-robust-retention", "selkv", "snapkv"),
    ("gate-helps", "selkv/gate", "selkv/merge-all"), ("ratio-above-count", "selkv", "selkv/gate+count"),
    ("compensation-needed", "selkv", "selkv/gate"), ("gains-larger-on-gqa", "selkv", "selkv/evict"),
    ("decoding-faster-at-100k",), ("overhead-under-5-percent",), ("kvslimmer-above-asymkv", "kvslimmer", "asymkv"),
    ("exact-above-diagonal", "kvslimmer", "kvslimmer/diagonal"), ("gradient-free", "kvslimmer", "asymkv"),
    ("slimmer-memory",), ("slimmer-latency",), ("keys-alike",), ("spectra-explain",),
    ("selkv-works-at-10", "selkv", "selkv/evict"), ("slimmer-latency-hotpotqa",),
    ("kvslimmer-where", "kvslimmer", "asymkv"), ("kvslimmer-same-sign", "kvslimmer", "asymkv"),
    ("selkv-robust-categories", "selkv", "snapkv"), ("selkv-above-full-at-80", "selkv", "full"),
    ("selkv-plug-in", "selkv/on-snapkv", "snapkv"),
]  # fmt: skip


def write(folder: Path, kl: dict[str, float], n: int = 6, seed: int = 0, **changes: Any) -> Path:
    """A carried run: ``n`` samples in each category, each arm around its KL, a score of 50 minus ten times that."""
    rng = np.random.default_rng(seed)
    rows = []
    for category in CATEGORIES:
        for i in range(n):
            for arm, level in kl.items():
                value = level + rng.normal(0, 0.01)
                rows.append({
                    "sample": f"{category}/{i}", "task": category, "category": category, "method": arm.partition("/")[0],
                    "arm": arm, "retain": 1.0 if arm == "full" else 0.25, "kl": value, "nll": value,
                    "score": 50 - 10 * value, "agree": 0.5, "kept_entries": 0.25, "kept_bytes": 0.25, **changes,
                })  # fmt: skip
    folder.mkdir(parents=True)
    pd.DataFrame(rows).to_csv(folder / results.CARRIED, index=False)
    return folder


def claim(arm: str = "selkv", baseline: str | tuple[str, ...] = "snapkv", **test: Any) -> Claim:
    baselines = (baseline,) if isinstance(baseline, str) else baseline
    return Claim("x", "SelKV", "x", "x", Comparison(arm, baselines, **test))


# The file


@pytest.mark.parametrize("wanted", LEAST, ids=lambda wanted: wanted[0])
def test_every_claim_of_the_papers_is_there(wanted: tuple[str, ...]) -> None:
    test = ALL[wanted[0]].test
    if len(wanted) > 1:
        assert isinstance(test, Comparison)
        assert test.arm == wanted[1] and wanted[2] in test.baseline
    else:
        assert isinstance(test, Spectra | Untested)


def test_details_of_claims_that_have_some() -> None:
    tests = {name: one.test for name, one in ALL.items() if isinstance(one.test, Comparison)}
    assert tests["selkv-closest-to-full"].retain == (0.25,)
    assert {"snapkv", "look-m", "pyramidkv"} <= set(tests["selkv-closest-to-full"].baseline)
    assert tests["selkv-above-full-multi-doc"].categories == ("multi-doc",)
    assert (min(tests["selkv-robust-retention"].retain), max(tests["selkv-robust-retention"].retain)) == (
        0.1,
        0.9,
    )
    assert tests["selkv-works-at-10"].retain == (0.1,)
    # the sweep has no 80 %, and the claim says at which neighbours of it it is tested
    assert tests["selkv-above-full-at-80"].retain == (0.75, 0.9)
    assert "75 and at 90 %" in ALL["selkv-above-full-at-80"].claim
    for name in readings.CLAIMS["retention"]:
        assert tests[str(name)].study == "sweep"
        assert set(tests[str(name)].retain) <= set(STUDIES["sweep"].retain)
    categories = ("selkv-above-full-multi-doc", "selkv-robust-categories", "kvslimmer-where")
    assert {name for name, test in tests.items() if test.profile} == set(categories)
    assert tests["selkv-robust-categories"].categories == CATEGORIES
    assert tests["kvslimmer-where"].categories == ("single-doc", "multi-doc", "synthetic")
    assert tests["gains-larger-on-gqa"].than == "smollm2-135m-mha"
    for name, test in tests.items():  # the full cache is no distance from itself
        assert "full" not in test.baseline or "kl" not in test.metrics, name
        assert bool(test.margin) == ("worse" in ALL[name].claim), name


def test_a_study_has_the_arms_of_its_claims() -> None:
    from kvrepro import profiles

    for name, one in ALL.items():
        if isinstance(one.test, Comparison):
            for profile in {"quick", one.test.profile or "quick"}:
                arms = STUDIES[one.test.study].arms if one.test.study else profiles.load(profile).arms
                assert {one.test.arm, *one.test.baseline} <= set(arms), name


def test_published_numbers_come_from_the_published_tables() -> None:
    told = {name: one.told() for name, one in ALL.items()}
    assert told["selkv-above-snapkv"] == "+0.15, +0.02, +0.00"
    assert told["selkv-above-pyramidkv"] == "−1.12"
    assert told["decoding-faster-at-100k"] == "3.3x" and told["slimmer-memory"] == "0.71"
    assert told["selkv-above-full-at-80"] == "+0.03"
    assert (
        told["kvslimmer-above-asymkv"] == "+0.92, +0.09"
    )  # with its own rerun, and with AsymKV's own number
    assert told["kvslimmer-where"] == "" and told["keys-alike"] == ""


GOOD = {
    "id": "a",
    "paper": "SelKV",
    "claim": "c",
    "source": "s",
    "test": {"arm": "selkv", "baseline": "snapkv"},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "unknown key 'colour'; known are id, paper, claim, source, test, published"),
        ({"source": None}, "the key 'source' is missing"),
        ({"paper": "Other"}, "unknown paper 'Other'"),
        ({"test": "later"}, "its test has no key of arm, asymmetry, not_tested"),
        ({"test": {"arm": "selkv"}}, "the key 'baseline' is missing"),
        ({"test": {"arm": "nope", "baseline": "snapkv"}}, "nope"),
        ({"test": {"arm": "selkv", "baseline": ["snapkv", "selkv/nope"]}}, "nope"),
        ({"test": {**GOOD["test"], "metrics": ["kl", "bleu"]}}, "unknown metrics 'bleu'"),
        ({"test": {**GOOD["test"], "margin": {"bleu": 1}}}, "unknown margin 'bleu'"),
        ({"test": {**GOOD["test"], "categories": "prose"}}, "unknown categories 'prose'"),
        ({"test": {**GOOD["test"], "study": "nope"}}, "unknown study 'nope'"),
        ({"test": {**GOOD["test"], "profile": "nope"}}, "unknown profile 'nope'"),
        ({"test": {**GOOD["test"], "retain": 0}}, r"retain \[0\]; shares"),
        ({"test": {**GOOD["test"], "retain": "much"}}, "claim 'a'"),
        ({"test": {**GOOD["test"], "because": "x"}}, "unknown key 'because'"),
        ({"test": {"asymmetry": ["K", "Z"]}}, "unknown asymmetry 'Z'"),
        ({"published": [{"value": ["SelKV", "m", "b", "s", "SelKV"]}]}, "no number for SelKV"),
        ({"published": [{"number": 3}]}, "unknown key 'number'"),
        ({"published": [3]}, "3 is no published"),
    ],
)
def test_a_malformed_claim_is_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([{**GOOD, **change}]))
    with pytest.raises(UserError, match=said) as caught:
        claims.load(path)
    assert "\n" not in str(caught.value) and "claim 'a'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (yaml.safe_dump([GOOD, GOOD]), "two claims are called 'a'"),
        ("just words", "a claim has no id"),
        ("- id: [", "restore the file"),
        ("", "a claim has no id"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        claims.load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="restore the file"):
        claims.load(tmp_path / "absent.yaml")


# Verdicts


def test_the_interval_decides() -> None:
    assert [stats.verdict(*pair) for pair in [(0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (0.0, 0.1)]] == [
        "supported", "contradicted", "inconclusive", "inconclusive"
    ]  # fmt: skip
    assert stats.verdict(float("nan"), 0.1) == "no interval"
    assert stats.together(["supported", "no interval", "inconclusive"]) == "no interval"


@pytest.mark.parametrize(
    ("level", "verdict"), [(0.2, "supported"), (0.4, "contradicted"), (0.3, "inconclusive")]
)
def test_each_verdict_comes_out_by_score_and_by_kl(tmp_path: Path, level: float, verdict: str) -> None:
    write(tmp_path / "quick", {"selkv": level, "snapkv": 0.3})
    judged = judge(claim(), Runs(tmp_path), n_boot=300)
    assert judged.verdicts == {"score": verdict, "kl": verdict}
    by_kl = judged.weakest("kl")
    assert (
        by_kl["diff"] == pytest.approx(level - 0.3, abs=0.01) and by_kl["low"] < by_kl["diff"] < by_kl["high"]
    )
    assert by_kl["n"] == 36 and by_kl["detectable"] > 0
    assert readings.verdict(judged) == verdict


def test_measures_that_disagree_are_both_named(tmp_path: Path) -> None:
    path = write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3}, score=50.0)
    judged = judge(claim(), Runs(path), n_boot=300)
    assert readings.verdict(judged) == "inconclusive by score, supported by KL"
    assert "score +0.00 [+0.00, +0.00] (every sample ties); KL −0.1" in readings.evidence(judged)


def test_one_sample_a_task_gives_no_verdict(tmp_path: Path) -> None:
    write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3}, n=1)
    assert set(judge(claim(), Runs(tmp_path)).verdicts.values()) == {"no interval"}


def test_a_claim_is_as_good_as_its_weakest_case(tmp_path: Path) -> None:
    write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3, "h2o": 0.1, "look-m": 0.5})
    judged = judge(claim(baseline=("snapkv", "h2o", "look-m")), Runs(tmp_path), n_boot=300)
    assert judged.verdicts["kl"] == "contradicted"
    assert judged.weakest("kl")["case"] == "against H2O"
    assert "against H2O (weakest of 3)" in readings.evidence(judged)
    assert (
        judge(claim(baseline=("snapkv", "look-m")), Runs(tmp_path), n_boot=300).verdicts["kl"] == "supported"
    )


def test_categories_are_judged_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3}) / results.CARRIED
    frame = pd.read_csv(path)
    frame.loc[(frame["arm"] == "selkv") & (frame["category"] == "code"), "kl"] += 0.5
    frame.to_csv(path, index=False)
    each = judge(claim(categories=CATEGORIES, metrics=("kl",)), Runs(tmp_path), n_boot=300)
    assert (
        len(each.cases) == 6
        and each.verdicts == {"kl": "contradicted"}
        and each.weakest("kl")["case"] == "in code"
    )
    two = judge(claim(categories=CATEGORIES[:2], metrics=("kl",)), Runs(tmp_path), n_boot=300)
    assert two.verdicts == {"kl": "supported"} and two.weakest("kl")["n"] == 6


def test_a_margin_turns_level_into_no_worse(tmp_path: Path) -> None:
    write(tmp_path / "quick", {"selkv": 0.3, "snapkv": 0.3})
    found = judge(claim(margin={"kl": 0.05}), Runs(tmp_path), n_boot=300).verdicts
    assert found == {"score": "inconclusive", "kl": "supported"}
    write(tmp_path / "worse" / "quick", {"selkv": 0.4, "snapkv": 0.3})
    assert (
        judge(claim(margin={"kl": 0.05}), Runs(tmp_path / "worse"), n_boot=300).verdicts["kl"]
        == "contradicted"
    )


def test_gains_of_two_models_are_compared_sample_by_sample(tmp_path: Path) -> None:
    arms = {"selkv": 0.1, "selkv/evict": 0.3}
    write(tmp_path / runner.folder("quick", study="methods"), arms)
    write(
        tmp_path / runner.folder("quick", "smollm2-135m-mha", study="methods"), arms | {"selkv": 0.2}, seed=1
    )
    judged = judge(ALL["gains-larger-on-gqa"], Runs(tmp_path), n_boot=300)
    assert judged.verdicts["kl"] == "supported"
    assert judged.weakest("kl")["diff"] == pytest.approx(-0.1, abs=0.02)
    assert judged.weakest("kl")["case"] == "on smollm2-135m minus on smollm2-135m-mha"


def test_spectra_are_read_from_the_stored_table(tmp_path: Path) -> None:
    path = write(tmp_path / "quick", {"selkv": 0.2})
    unstored = judge(ALL["keys-alike"], Runs(tmp_path))
    assert not unstored.verdicts and "notebook 6" in unstored.why
    parts = [
        asymmetry.Part(part, rank, 0.9, 0.6 if part in asymmetry.SEEN else -0.2, 1.0, verdict)
        for part, verdict in [("K", "supported"), ("Q", "supported"), ("alike", "supported"), ("keys", "inconclusive"),
                              ("values", "contradicted"), ("gap", "inconclusive")]
        for rank in asymmetry.RANKS
    ]  # fmt: skip
    asymmetry.write(parts, path)
    assert asymmetry.read(path) == parts
    assert judge(ALL["spectra"], Runs(tmp_path)).verdicts == {"heads": "supported"}
    explained = judge(ALL["spectra-explain"], Runs(path))
    assert explained.verdicts == {"correlation": "contradicted"}
    assert explained.weakest("correlation")["case"].startswith(asymmetry.PARTS["values"])
    assert "ρ = +0.90 [−0.20, +1.00]" in readings.evidence(explained)


# Shares of entries, and benchmarks


def sweep(folder: Path, levels: dict[float, dict[str, float]]) -> Path:
    """A carried sweep: the arms' KL at each share, and a full cache."""
    parts = [write(folder.parent / f"{share}", kl) / results.CARRIED for share, kl in levels.items()]
    frames = [pd.read_csv(path).assign(retain=share) for path, share in zip(parts, levels, strict=True)]
    full = pd.read_csv(write(folder.parent / "full", {"full": 0.0}) / results.CARRIED)
    folder.mkdir()
    pd.concat([full, *frames]).to_csv(folder / results.CARRIED, index=False)
    return folder


@pytest.mark.parametrize(
    ("gap", "verdict"), [(-0.1, "supported"), (0.1, "contradicted"), (0.0, "inconclusive")]
)
def test_claims_about_shares_are_judged_by_the_sweep(tmp_path: Path, gap: float, verdict: str) -> None:
    """The arm lies by so much above its baselines at 10 %, and well below them at all other shares."""
    best = {"selkv": 0.1, "selkv/evict": 0.3, "snapkv": 0.3}
    shares = STUDIES["sweep"].retain
    sweep(tmp_path / "quick-sweep", {x: {**best, "selkv": 0.3 + gap} if x == 0.1 else best for x in shares})
    runs = Runs(tmp_path)
    judged = judge(ALL["selkv-works-at-10"], runs, n_boot=300)
    assert judged.verdicts["kl"] == verdict and judged.weakest("kl")["case"] == ""
    robust = judge(ALL["selkv-robust-retention"], runs, n_boot=300)
    # level is no worse, by the margin
    assert robust.verdicts["kl"] == ("contradicted" if verdict == "contradicted" else "supported")
    assert len(robust.cases) == 2 * len(shares)
    assert robust.weakest("kl")["case"] == "at 10%"


def test_better_than_the_full_cache_needs_both_neighbours_of_80(tmp_path: Path) -> None:
    better, worse = {"selkv": -0.2}, {"selkv": 0.2}  # of NLL and score, both against the full cache's 0
    claim = ALL["selkv-above-full-at-80"]
    sweep(tmp_path / "quick-sweep", {0.75: better, 0.9: better})
    assert judge(claim, Runs(tmp_path), n_boot=300).verdicts == {"score": "supported", "nll": "supported"}
    (tmp_path / "b").mkdir()
    sweep(tmp_path / "b" / "quick-sweep", {0.75: worse, 0.9: better})
    judged = judge(claim, Runs(tmp_path / "b"), n_boot=300)
    assert judged.verdicts["nll"] == "contradicted" and judged.weakest("nll")["case"] == "at 75%"
    (tmp_path / "c").mkdir()
    sweep(tmp_path / "c" / "quick-sweep", {0.75: better})
    why = judge(claim, Runs(tmp_path / "c")).why
    assert why.startswith("quick-sweep has no selkv at 90% of the entries; `")


def test_a_claim_about_categories_prefers_the_benchmarks_rows(tmp_path: Path) -> None:
    claim = ALL["selkv-above-full-multi-doc"]
    write(tmp_path / "quick", {"full": 0.3, "selkv": 0.4})
    offline = judge(claim, Runs(tmp_path), n_boot=300)
    assert offline.verdicts["nll"] == "contradicted" and offline.weakest("nll")["case"] == "on offline tasks"
    write(tmp_path / "longbench", {"full": 0.3, "snapkv": 0.2}, task="longbench-e/lcc")
    assert judge(claim, Runs(tmp_path), n_boot=300).verdicts == offline.verdicts  # that run has no such arm
    (tmp_path / "longbench" / results.CARRIED).unlink()
    (tmp_path / "longbench").rmdir()
    path = write(tmp_path / "longbench", {"full": 0.3, "selkv": 0.2}, task="longbench-e/hotpotqa")
    rows = judge(claim, Runs(tmp_path), n_boot=300)
    assert rows.verdicts["nll"] == "supported" and rows.weakest("nll")["case"] == "on LongBench-E"
    assert judge(claim, Runs(path), n_boot=300).verdicts == rows.verdicts  # given alone


def test_a_dataset_with_one_row_does_not_keep_the_others_from_a_verdict(tmp_path: Path) -> None:
    path = write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3}) / results.CARRIED
    frame = pd.read_csv(path)
    lone = frame[frame["sample"] == "code/0"].assign(sample="other/0", task="other")
    pd.concat([frame, lone]).to_csv(path, index=False)
    judged = judge(claim(), Runs(tmp_path), n_boot=300)
    assert judged.verdicts["kl"] == "supported" and judged.weakest("kl")["n"] == 36


def test_some_claims_alone_and_the_command_for_rows(tmp_path: Path) -> None:
    write(tmp_path / "longbench", {"selkv": 0.2, "snapkv": 0.3}, task="longbench/lcc")
    ids = readings.CLAIMS["retention"]
    judged = claims.judge_all(tmp_path, profile="longbench", ids=[str(x) for x in ids])
    assert {one.claim.id for one in judged} == set(ids)
    assert judged[0].why.endswith("`kvrepro run --profile longbench --study sweep --data DIR`")


# What is not there


def test_what_is_not_stored_is_not_tested_and_says_what_to_run(tmp_path: Path) -> None:
    write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3})
    runs = Runs(tmp_path)
    why = judge(ALL["exact-above-diagonal"], runs).why
    assert why == "no records of quick-slimmer; `kvrepro run --profile quick --study slimmer`"
    why = judge(ALL["kvslimmer-same-sign"], runs).why
    assert why.endswith("--study methods --model mistral-7b-v0.3`")
    assert judge(claim("selkv", "h2o"), runs).why.startswith("quick has no h2o at 25% of the entries; `")
    assert judge(claim(retain=(0.25, 0.1)), runs).why.startswith("quick has no selkv at 10% of the entries")
    reason = "no measurement is stored yet; `kvrepro bench slimmer` sets the two side by side"
    assert judge(ALL["slimmer-memory"], runs).why == reason
    assert readings.verdict(judge(ALL["slimmer-memory"], runs)) == f"not tested here: {reason}"


def test_a_run_that_has_just_begun_decides_nothing(tmp_path: Path) -> None:
    write(tmp_path / "quick", {"selkv": 0.2, "snapkv": 0.3})
    begun = tmp_path / "quick-slimmer"
    begun.mkdir()
    for content in (b"", b'{"unit": {"sam'):
        (begun / results.RECORDS).write_bytes(content)
        assert not results.holds(begun)
        assert "no records of quick-slimmer" in judge(ALL["exact-above-diagonal"], Runs(tmp_path)).why
    path = tmp_path / "quick" / results.CARRIED
    frame = pd.read_csv(path)
    odd = frame["sample"].str.endswith(("1", "3", "5"))
    frame[odd == (frame["arm"] == "selkv")].to_csv(path, index=False)
    assert judge(claim(), Runs(tmp_path)).why.startswith("no sample has score for selkv and snapkv")


def test_ones_own_run_goes_before_the_carried_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ROOTS", (tmp_path / "own", tmp_path / "carried"))
    write(tmp_path / "carried" / "quick", {"selkv": 0.4, "snapkv": 0.3})
    assert judge(claim(metrics=("kl",)), Runs(), n_boot=300).verdicts == {"kl": "contradicted"}
    write(tmp_path / "own" / "quick", {"selkv": 0.2, "snapkv": 0.3})
    assert judge(claim(metrics=("kl",)), Runs(), n_boot=300).verdicts == {"kl": "supported"}


def test_one_run_judges_whatever_it_has_the_arms_for(tmp_path: Path) -> None:
    path = write(tmp_path / "mine", {"full": 0.0, "selkv": 0.2, "snapkv": 0.3, "look-m": 0.4})
    judged = {one.claim.id: one for one in claims.judge_all(path, n_boot=200)}
    assert judged["selkv-above-look-m"].verdicts["kl"] == "supported"  # of a study, but the arms are here
    assert not judged["gate-helps"].verdicts
    assert (
        not judged["gains-larger-on-gqa"].verdicts and "several models" in judged["gains-larger-on-gqa"].why
    )
    text = readings.claims_as_text(list(judged.values()))
    head, *lines = text.split("\n\n")[0].splitlines()
    assert all(
        line[head.index("published") - 2 : head.index("published")] == "  " for line in lines
    )  # aligned
    counted = readings.counts(list(judged.values()))
    assert counted["SelKV", "score"].sum() == sum(one.claim.paper == "SelKV" for one in judged.values())


# The command line


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "quick", {"full": 0.0, "selkv": 0.2, "snapkv": 0.3})
    assert main(["claims", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "selkv-above-snapkv" in out and "supported" in out and "not tested here:" in out
    assert main(["claims", str(tmp_path / "quick"), "--json"]) == 0
    found = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(found) == set(ALL)
    row = found["selkv-above-snapkv"]
    assert row["verdicts"] == {"score": "supported", "kl": "supported"} and row["why"] == ""
    assert {case["metric"] for case in row["cases"]} == {"score", "kl"}
    assert row["cases"][1]["low"] < row["cases"][1]["diff"] < 0 and row["cases"][1]["n"] == 36
    assert found["slimmer-memory"]["cases"] == [] and found["slimmer-memory"]["why"]


def test_bad_input_of_the_command_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for words in ([str(tmp_path)], [str(tmp_path / "absent")], ["--profile", "nope"]):
        assert main(["claims", *words]) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("kvrepro: ") and err.count("\n") == 1


def test_notebooks_judge_claims_of_the_file_by_their_id() -> None:
    named = [item for items in readings.CLAIMS.values() for item in items]
    assert {item for item in named if isinstance(item, str)} <= set(ALL)
    texts = {one.claim for one in ALL.values()}
    pairs = {(one.test.arm, one.test.baseline) for one in ALL.values() if isinstance(one.test, Comparison)}
    for item in named:
        if isinstance(item, Claim):  # what no paper states
            assert item.claim not in texts
            assert isinstance(item.test, Comparison) and (item.test.arm, item.test.baseline) not in pairs
