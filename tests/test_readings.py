"""Verdicts follow the numbers, in both directions and for measures where less is better."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvrepro import stats
from kvrepro.measure import readings
from kvrepro.tasks.base import CATEGORIES

NOISE = np.random.default_rng(0).normal(0, 0.02, 48)


def records(kl: dict[str, np.ndarray | float], score: float = 0.0) -> pd.DataFrame:
    """48 samples of six tasks; each arm's KL, and a score that is 40 + ``score`` for selkv, 40 for others."""
    rows = []
    for arm, values in kl.items():
        for i, value in enumerate(np.broadcast_to(values, 48)):
            category = CATEGORIES[i % 6]
            rows.append({
                "sample": f"{category}/{i}", "task": category, "category": category, "method": arm, "arm": arm,
                "retain": 0.25, "score": 40.0 + score * (arm == "selkv"), "nll": 1.0, "kl": value, "agree": 1.0,
                "kept_entries": 0.25, "kept_bytes": 0.25, "diag.share_routed": 0.2,
            })  # fmt: skip
    return pd.DataFrame(rows)


def verdicts(frame: pd.DataFrame, name: str = "bias") -> dict[tuple[str, str], str]:
    judged = readings.judge(frame, name, n_boot=200)
    return dict(zip(zip(judged["claim"], judged["metric"]), judged["verdict"]))


@pytest.fixture
def bias() -> pd.DataFrame:
    return records({"selkv": 0.5 + NOISE, "selkv/gate": 0.6, "selkv/gate+count": 0.4, "selkv/alpha-1": 0.5})


def test_a_lower_kl_supports_and_a_higher_one_contradicts(bias):
    found = verdicts(bias)
    assert found["compensation is needed: the ratio bias improves gated merging", "kl"] == "supported"
    assert found["the ratio bias beats counting", "kl"] == "contradicted"
    assert found["half of log R beats the whole of it", "kl"] == "inconclusive"


def test_a_higher_score_supports():
    frame = records({"selkv": 0.5, "selkv/gate": 0.5, "selkv/gate+count": 0.5, "selkv/alpha-1": 0.5}, score=3)
    frame.loc[frame["sample"].str.endswith("/7"), "score"] += 1
    assert (
        verdicts(frame)["compensation is needed: the ratio bias improves gated merging", "score"]
        == "supported"
    )


def test_sentences_give_the_difference_its_interval_and_what_could_be_missed(bias):
    judged = readings.judge(bias, "bias", n_boot=200)
    text = readings.sentences(judged)
    row = judged[
        (judged["claim"] == "half of log R beats the whole of it") & (judged["metric"] == "kl")
    ].iloc[0]
    assert text.count("\n- ") == 3
    assert f"[{row['low']:+.4f}, {row['high']:+.4f}]".replace("-", "−") in text
    assert f"a true difference below {row['detectable']:.4f} could be missed" in text
    assert "score +0.00 [+0.00, +0.00]: **inconclusive** (every sample ties)" in text
    assert "The papers' own difference in score: +0.24." in text  # 39.81 - 39.57


def test_differences_are_those_of_the_comparison(bias):
    comparison = stats.compare(bias, ["kl"], ["selkv", "selkv/alpha-1"], "selkv/gate", n_boot=200)
    table = readings.differences(comparison)
    assert table.index.tolist() == ["SelKV", "SelKV: alpha 1"]
    assert table.index.name == "minus SelKV: gate, no bias"
    row = comparison.iloc[0]
    cells = table.loc["SelKV", "KL, nats a token"]
    assert cells[
        "difference [95 %]"
    ] == f"{row['diff']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]".replace("-", "−")
    assert cells["detectable"] == f"{row['detectable']:.4f}"


def test_few_samples_are_said_and_one_sample_gives_no_verdict(bias):
    assert readings.caution(bias) == ""
    few = bias[bias["sample"].str.extract(r"/(\d+)$", expand=False).astype(int) < 12]
    assert readings.reading(few, "bias").startswith("**Only 12 samples: ")
    single = bias[bias["sample"].str.extract(r"/(\d+)$", expand=False).astype(int) < 6]
    assert set(verdicts(single).values()) == {"no interval"}


def test_headroom_names_the_categories_with_little_to_lose():
    frame = records({"full": 0.0})
    assert readings.headroom(frame) == (
        "With its full cache the model scores 40.0 of 100 on average, and at least 10 everywhere."
    )
    frame.loc[frame["category"] == "code", "score"] = 2.0
    assert "below 10 in code, where" in readings.headroom(frame)


def test_numbers_get_the_digits_that_they_deserve():
    table = pd.DataFrame(
        {"score": [41.234], "kl": [0.12345], "retain": [0.25], "kept_bytes": [0.2522], "n": [96], "log R": [0.06331],
         "average": [np.nan], "who": ["x"]}
    )  # fmt: skip
    assert readings.readable(table).iloc[0].tolist() == [
        "41.2",
        "0.123",
        "25%",
        "25.2%",
        "96",
        "0.0633",
        "–",
        "x",
    ]


def test_settings_and_mechanics_are_tables_for_people(bias):
    settings = readings.settings("selkv")
    assert settings.loc["alpha"].tolist() == ["0.5", "α of the ratio bias", "paper (step 6)"]
    assert readings.settings("kvslimmer").loc["chunk", "default"] == "None"
    assert readings.mechanics(bias, ["selkv"]).loc[
        "SelKV", "share of evicted tokens with a target"
    ] == pytest.approx(0.2)


def test_kvslimmers_arms_are_judged_against_it():
    frame = records({"kvslimmer": 0.4, "kvslimmer/diagonal": 0.4, "kvslimmer/mass": 0.4 + NOISE,
                     "kvslimmer/mean": 0.5 + NOISE, "kvslimmer/drop-lighter": 0.3 + NOISE})  # fmt: skip
    found = {
        claim: verdict for (claim, metric), verdict in verdicts(frame, "hessian").items() if metric == "kl"
    }
    assert list(found.values()) == ["inconclusive", "inconclusive", "supported", "contradicted"]


def test_asymkvs_value_ablation_stands_beside_ours():
    table = readings.published_values()
    assert table.loc["attention", ["symmetric V", "asymmetric V"]].tolist() == [14.99, 23.83]
    assert table.index.tolist() == ["mean", "cardinality", "attention", "optimal k*"]
    assert table["difference"].round(2).tolist() == [2.93, 3.01, 8.84, 3.22]


def test_published_averages_hold_the_arms_that_have_some():
    table = readings.published_averages(["full", "selkv", "selkv/gate+count"])
    assert table.index.tolist() == ["full", "selkv"]
    assert table.loc["selkv", "SelKV: Gemma-2-9B-IT (25% retention; 3500 tokens)"] == 42.31
