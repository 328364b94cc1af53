"""The command line as a person meets it: readable tables, JSON for scripts, one line and exit code 2 for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrepro.cli import main
from kvrepro.methods import available


def call(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", available())
def test_explain_shows_formula_settings_and_who_says_so(capsys: Any, name: str) -> None:
    code, out, _ = call(capsys, "explain", name)
    assert code == 0 and "formula" in out and "schedule" in out
    code, out, _ = call(capsys, "explain", name, "--json")
    found = json.loads(out)
    assert all(row["source"] and row["meaning"] for row in found["settings"])
    for arm in found["arms"]:
        assert call(capsys, "explain", f"{name}/{arm}")[0] == 0


def test_methods_and_models_are_listed(capsys: Any) -> None:
    code, out, _ = call(capsys, "methods")
    assert code == 0 and all(name in out for name in available())
    assert {row["method"] for row in json.loads(call(capsys, "methods", "--json")[1])} == set(available())
    code, out, _ = call(capsys, "models", "--json")
    licenses = {row["name"]: row["license"] for row in json.loads(out)}
    assert code == 0 and licenses["smollm2-135m"] == "Apache-2.0" and "Gemma terms" in licenses["gemma3-270m"]


@pytest.mark.parametrize("words", [
    ("explain", "nope"), ("explain", "selkv/nope"), ("run", "--profile", "nope"),
    ("run", "--profile", "smoke", "--methods", "nope"), ("run", "--profile", "smoke", "--tasks", "nope"),
    ("run", "--profile", "smoke", "--retain", "0"), ("run", "--profile", "smoke", "--retain", "nan"),
    ("run", "--profile", "smoke", "--limit", "0"), ("table", "no/such/folder"), ("figures", "no/such/folder"),
    ("generate", "--prompt-file", "no/such/file"), ("notebooks", "--only", "no-such-notebook"),
    ("notebooks", "--profile", "nope"), ("vectors", "README.md"), ("generate", "--prompt-file", "."),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    if words[0] == "run":
        words = (*words, "--out", str(tmp_path))
    code, out, err = call(capsys, *words)
    assert code == 2 and not out
    assert err.startswith("kvrepro: ") and err.count("\n") == 1


def test_generate_answers_and_tells_what_the_cache_held(capsys: Any, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(
        "The warehouse holds crates. " * 40 + "The magic number is 7361942. What is the magic number?"
    )
    words = ("generate", "--retain", "0.5", "--prompt-file", str(prompt), "--max-new-tokens", "16")
    code, out, _ = call(capsys, *words)
    assert code == 0 and "selkv" in out and "entries" in out
    found = json.loads(call(capsys, *words, "--json")[1])
    held = found["prompt_tokens"] // 2 + found["prompt_tokens"] % 2 + found["new_tokens"] - 1
    assert {line["entries"] for line in found["layers"]} == {held}
    prompt.write_bytes(b"\xff\xfe\x00")
    assert call(capsys, "generate", "--prompt-file", str(prompt))[0] == 2
