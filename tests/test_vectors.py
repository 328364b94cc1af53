"""The known-answer files: written again they are the committed ones, and the naive loops agree with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_methods import naive_answer

from kvrepro import vectors

FOLDER = Path(__file__).parents[1] / "data" / "vectors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vectors.write(folder)
    return folder


def test_every_method_and_arm_has_a_committed_file(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_committed_answers_still_hold(written: Path, path: Path) -> None:
    then, now = json.loads(path.read_text()), json.loads((written / path.name).read_text())
    assert then.keys() == now.keys()
    for name, value in then.items():
        if isinstance(value, list):
            assert np.allclose(value, now[name], rtol=0, atol=1e-10), name
        elif name == "diagnostics":
            assert value == pytest.approx(now[name], abs=1e-10, nan_ok=True)
        else:
            assert value == now[name], name


@pytest.mark.parametrize("shape", vectors.SHAPES)
@pytest.mark.parametrize("case", vectors.cases())
def test_the_naive_loop_agrees(case: str, shape: str) -> None:
    given = json.loads((FOLDER / f"inputs-{shape}.json").read_text())
    answer = json.loads((FOLDER / f"{case.replace('/', '+')}-{shape}.json").read_text())
    cos, sin = vectors.tables(torch.arange(vectors.TOKENS), torch.float64)
    prompt = (np.array(given[name]) for name in ("queries", "keys", "values"))
    expected = naive_answer(case, *prompt, given["scaling"], given["budget"], cos.numpy(), sin.numpy())
    assert np.array_equal(answer["positions"], expected["positions"])
    for name in ("keys", "values"):
        assert np.abs(np.array(answer[name]) - expected[name]).max() < 1e-10
    if expected["bias"] is None:
        assert answer["bias"] is None
    else:
        assert np.abs(np.array(answer["bias"]) - expected["bias"]).max() < 1e-10
