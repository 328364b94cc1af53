"""The arithmetic of docs/scale.md: against public numbers, torch's own counters, and the page itself."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import kvrepro
from kvrepro import cli, costs, methods, models, profiles, studies

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
TINY = costs.Shape(3, 32, 4, 2, 8, 64, 97)  # conftest's llama
VIEWS = {
    "view", "_unsafe_view", "_reshape_alias", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "unflatten", "alias", "detach", "as_strided", "narrow", "empty",
    "empty_strided", "empty_like", "new_empty", "lift_fresh", "is_same_size",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("longchat-7b", 6_738_415_616), ("llama-3.1-8b", 8_030_261_248), ("gemma-2-9b", 9_241_705_984),
        ("mistral-7b-v0.3", 7_248_023_552), ("qwen2-1.5b", 1_543_714_304), ("qwen2-7b", 7_615_616_512),
    ],
)  # fmt: skip
def test_models_have_their_published_size(name: str, parameters: int) -> None:
    assert costs.SHAPES[name].parameters == parameters
    assert models.REGISTRY[name].kind == "hub"


def test_a_prefill_has_the_operations_that_torch_counts() -> None:
    n = 50
    model = build_tiny("llama", dtype=torch.float32, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, n, dtype=torch.long), logits_to_keep=1)
    other_half = TINY.layers * 2 * TINY.heads * TINY.head_dim * n**2  # which a causal kernel leaves out
    head = 2 * TINY.hidden * TINY.vocabulary
    assert counter.get_total_flops() == costs.prefill_flops(TINY, n) + other_half + head


def test_a_cache_has_the_bytes_that_it_reports() -> None:
    model = build_tiny("llama", dtype=torch.bfloat16)
    cache = kvrepro.make_cache(model, "full")
    with torch.no_grad():
        model(torch.zeros(1, 50, dtype=torch.long), cache=cache)
    assert sum(line["bytes_used"] for line in cache.report()) == TINY.kv_bytes(50)


class Operations(TorchDispatchMode):
    """Counts tensor operations, without those that only look at memory in another way."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def test_operations_of_a_layer_are_as_counted() -> None:
    """Of one-shot arms in the mean, of the dearest others a chunk; and of a forward pass."""
    n, layers = 200, 2
    model = build_tiny("llama", dtype=torch.float32, num_hidden_layers=layers)
    ids = torch.randint(0, 97, (1, n))

    def layer(arm: str) -> float:
        cache = kvrepro.make_cache(model, arm, retain=0.4)
        with torch.no_grad(), Operations() as seen:
            kvrepro.prefill(model, cache, ids)
            model(ids[:, cache.get_seq_length() :], cache=cache, logits_to_keep=1)
        return seen.count / layers

    forward = layer("full")
    found: dict[str, list[float]] = {"layer": [forward]}
    for arm in (*profiles.load("papers").arms[1:], "kvslimmer", "kvslimmer-released"):
        method = methods.make(arm)
        chunks = 1 if method.schedule == "one-shot" else len(method.chunks(n, round(0.4 * n)))
        found.setdefault(method.schedule, []).append((layer(arm) - forward) / chunks)
    for what, stated in costs.OPERATIONS.items():
        counted = sum(found[what]) / len(found[what])
        assert 2 / 3 * stated <= counted <= 1.1 * stated, (what, counted)


def test_costs_grow_with_what_is_asked() -> None:
    shape, h100, a100 = costs.SHAPES["llama-3.1-8b"], costs.DEVICES["H100"], costs.DEVICES["A100"]

    def hours(device: costs.Device = h100, context: int = 3500, arms: Any = ("full", "selkv"), shares: Any = (0.25,)) -> float:  # fmt: skip  # noqa: E501
        return costs.estimate(shape, device, context, arms, shares).hours

    assert hours() < hours(a100)
    assert hours() < hours(context=31500)
    assert hours() < hours(shares=(0.25, 0.5))
    one_shot, chunked, driven = (
        hours(arms=("full", "selkv", arm)) for arm in ("snapkv", "kvslimmer", "asymkv")
    )
    assert hours() < one_shot < chunked < driven


def test_the_page_has_the_numbers_of_today() -> None:
    text = PAGE.read_text(encoding="utf-8")
    written = text.split(costs.BEGIN)[1].split(costs.END)[0].strip()
    assert written == costs.block(), "python -m kvrepro.costs docs/scale.md"
    assert "estimated, not measured on a GPU" in text.replace("\n", " ")


def test_the_page_gives_commands_that_exist() -> None:
    code = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S))
    commands = re.findall(r"kvrepro (?:run|table|figures|claims) [^#\n]*", code.replace("\\\n", " "))
    for command in commands:
        given = cli._parser().parse_args(shlex.split(command.replace("$model", "llama-3.1-8b"))[1:])
        if given.command is cli.run:
            profile = studies.of(given.study, given.profile) if given.study else profiles.load(given.profile)
            for arm in (given.methods or ",".join(profile.arms)).split(","):
                methods.make(arm)
    assert sum(command.startswith("kvrepro run") for command in commands) >= 6
    named = re.findall(r"for model in (.*); do", code)[0].split()
    assert sorted(named) == sorted(costs.SHAPES) and set(named) <= set(models.REGISTRY)
