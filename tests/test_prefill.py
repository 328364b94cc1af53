"""The prefill bench on the real model: what is timed is what is said; a timing decides nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrepro.cli import main
from kvrepro.measure import prefill


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return prefill.run("smollm2-135m", contexts=[1024], methods=["snapkv", "kvslimmer"], repeats=2)


def test_every_arm_is_held_against_the_plain_prefill_of_its_repeat(found: dict[str, Any]) -> None:
    assert [row["arm"] for row in found["rows"]] == ["full", "snapkv", "kvslimmer"]
    for row in found["rows"]:
        assert 800 < row["context"] <= 1024 and len(row["seconds"]) == 2
        assert all(
            0 <= inside < whole for inside, whole in zip(row["compression"], row["seconds"], strict=True)
        )
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    full, *others = found["rows"]
    assert full["ratio"]["median"] == 1 and full["compression"] == [0, 0]
    assert all(row["overhead"]["low"] > 0 for row in others)


def test_it_is_a_table_for_people_and_json_for_programs(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefill.text(found).count("\n") == 3
    on_gpu = {"rows": [row | {"overhead": None} for row in found["rows"]]}
    assert all(line.endswith("–") for line in prefill.text(on_gpu).splitlines()[1:])
    asked: dict[str, Any] = {}
    monkeypatch.setattr(prefill, "run", lambda model, **given: asked.update(given) or found)
    assert main(["bench", "prefill", "--context", "1024", "2048", "--methods", "selkv,h2o", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["arm"] == "full"
    assert asked["contexts"] == [1024, 2048] and asked["methods"] == ["selkv", "h2o"]
