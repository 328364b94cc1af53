"""True gradients and what is made of them, against autograd and brute force in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from kvrepro.errors import UserError
from kvrepro.hf import make_cache
from kvrepro.measure import hessian
from kvrepro.measure.observe import observe
from kvrepro.methods.pairs import choose_pairs
from kvrepro.theory.hessian import norm_weight, output_curvature

RETAIN, N = 0.5, 48  # m = 24: 3 sinks, chunks of 6
SINKS, CHUNK = 3, 6
IDS = torch.randint(1, 97, (1, N + 1), generator=torch.Generator().manual_seed(3))


def loss_of(model, change: tuple[int, Tensor] | None = None) -> Tensor:
    """The chunk's loss from one plain forward, with something added to the output that a layer hands to o_proj."""

    def add(module, inputs):
        return (inputs[0] + change[1],)

    hooks = []
    if change is not None:
        hooks = [model.get_decoder().layers[change[0]].self_attn.o_proj.register_forward_pre_hook(add)]
    logits = model(IDS[:, :-1], use_cache=False).logits[0, -CHUNK:]
    for hook in hooks:
        hook.remove()
    return torch.nn.functional.cross_entropy(logits, IDS[0, -CHUNK:])


@pytest.fixture(scope="module", params=["llama", "llama-mha", "gemma2"])
def seen(request, tiny) -> SimpleNamespace:
    """A tiny model, what is measured on it, and what its compressible layers saw."""
    model = tiny(request.param)
    found = hessian.measure(model, IDS, RETAIN, pairs=4, draws=16)
    places = [1] if request.param == "gemma2" else [0, 1, 2]
    layers = [(entries, observed) for entries, observed in observe(model, IDS[:, :-1])[0]]
    return SimpleNamespace(
        model=model, found=found, places=places, layers=layers, gradients=hessian.gradients(model, IDS, CHUNK)
    )


def explicit(seen, layer: int, head: int, query: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits z [n'], values [n', D] and E [D] of one query head and one of the chunk's queries, nothing folded."""
    entries, observed = seen.layers[layer]
    at, kv = N - CHUNK + query, head // (observed.heads // entries.kv_heads)
    z = observed.scaling * entries.keys[kv, : at + 1] @ observed.queries[head, at]
    if observed.softcap is not None:
        z = observed.softcap * torch.tanh(z / observed.softcap)
    # Clones: what was observed in inference mode cannot enter autograd.
    return z.clone(), entries.values[kv, : at + 1].clone(), seen.gradients[layer][head, query]


@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "qwen3", "phi3", "gemma2", "gemma3"])
def test_the_gradient_is_the_slope_of_the_loss(tiny, architecture):
    """By central differences of a plain forward without any cache, and by autograd through it."""
    model = tiny(architecture)
    found = hessian.gradients(model, IDS, CHUNK)
    places = [1] if architecture.startswith("gemma") else [0, 1, 2]
    assert len(found) == len(places)
    for gradient, place in zip(found, places):
        heads, _, width = gradient.shape
        leaf = torch.zeros(1, N, heads * width, dtype=torch.float64, requires_grad=True)
        (whole,) = torch.autograd.grad(loss_of(model, (place, leaf)), leaf)
        expected = whole[0, -CHUNK:].view(CHUNK, heads, width).transpose(0, 1)
        assert (gradient - expected).abs().max() < 1e-12

        step = torch.zeros(1, N, heads * width, dtype=torch.float64)
        step[0, N - CHUNK + 2, width + 5] = 1e-2  # query 2, head 1, channel 5
        with torch.no_grad():  # transformers' norms round to float32, so a smaller step finds noise
            slope = (loss_of(model, (place, step)) - loss_of(model, (place, -step))) / 2e-2
        assert float(gradient[1, 2, 5]) == pytest.approx(float(slope), rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_left_on_the_model(tiny, frozen):
    model = tiny("llama")
    expected = hessian.gradients(model, IDS, CHUNK)
    model.requires_grad_(not frozen)
    model.lm_head.weight.requires_grad_(frozen)  # one that differs from the rest
    before = [parameter.requires_grad for parameter in model.parameters()]
    with torch.inference_mode():
        found = hessian.gradients(model, IDS, CHUNK)
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer.self_attn.o_proj._forward_pre_hooks for layer in model.model.layers)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_true_weights_are_those_of_second_derivatives_by_autograd(seen):
    """g_ij = ∂²(E·o)/∂z_i∂z_j, one query and head at a time."""
    group = seen.layers[0][1].heads // seen.layers[0][0].kv_heads
    for _, row in seen.found.pairs.groupby(["set", "layer"]).head(2).iterrows():
        total = torch.zeros(2, 2, dtype=torch.float64)
        first = row["first"]
        for head in range(row["head"] * group, (row["head"] + 1) * group):
            for query in range(CHUNK):
                z, values, gradient = explicit(seen, row["layer"], head, query)

                def loss(pair: Tensor, z=z, values=values, gradient=gradient, first=first) -> Tensor:
                    moved = torch.cat([z[:first], pair, z[first + 2 :]])
                    return gradient @ (torch.softmax(moved, 0) @ values)

                total += torch.autograd.functional.hessian(loss, z[first : first + 2])
        curvature = total.sum()
        assert row["curvature"] == pytest.approx(float(curvature), rel=1e-9)
        assert row["true"] == pytest.approx(float((total[0, 0] + total[0, 1]) / curvature), rel=1e-8)


def test_cosines_and_attention_are_those_of_single_queries(seen):
    for _, row in seen.found.draws.groupby(["set", "layer", "head"]).head(2).iterrows():
        z, values, gradient = explicit(seen, row["layer"], row["head"], row["query"])
        weights, first = torch.softmax(z, 0), row["first"]
        curvature = output_curvature(weights, values)
        for name, i, j, sign in (("c11", 0, 0, 1), ("c22", 1, 1, 1), ("c12", 0, 1, -1)):
            expected = sign * torch.cosine_similarity(gradient, curvature[first + i, first + j], 0)
            assert row[name] == pytest.approx(float(expected), abs=1e-10)
        assert row["alpha1"] == pytest.approx(float(weights[first]), rel=1e-10)
        assert row["alpha2"] == pytest.approx(float(weights[first + 1]), rel=1e-10)


def test_gradient_free_weights_are_the_closed_forms(seen):
    group = seen.layers[0][1].heads // seen.layers[0][0].kv_heads
    checked = 0
    for _, row in seen.found.pairs.iterrows():
        norms, mass = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        largest = 0.0
        for head in range(row["head"] * group, (row["head"] + 1) * group):
            for query in range(CHUNK):
                z, values, _ = explicit(seen, row["layer"], head, query)
                weights, both = torch.softmax(z, 0), slice(row["first"], row["first"] + 2)
                norms += output_curvature(weights, values)[both, both].norm(dim=-1)
                mass += weights[both]
                largest = max(largest, float(weights[both].sum()))
        assert row["mass"] == pytest.approx(float(mass[0] / mass.sum()), rel=1e-10)
        assert row["attention"] == pytest.approx(float(mass.sum()) / group / CHUNK, rel=1e-10)
        expected = float(norm_weight(norms[0, 0], norms[0, 1], norms[1, 1]))
        if largest < 0.45 and 0 <= expected <= 1:  # no guard
            checked += 1
            assert row["exact"] == pytest.approx(expected, abs=1e-10)
            assert row["diagonal"] == pytest.approx(
                float(norms[0, 0] / (norms[0, 0] + norms[1, 1])), abs=1e-10
            )
    assert checked > len(seen.found.pairs) / 4


def test_the_change_of_the_outputs_is_that_of_the_merged_entries(seen):
    """The pair's key before RoPE, its mean value and log 2 as a bias, attended to one query at a time."""
    group = seen.layers[0][1].heads // seen.layers[0][0].kv_heads
    for _, row in seen.found.pairs.groupby(["set", "layer"]).head(2).iterrows():
        entries, observed = seen.layers[row["layer"]]
        kv, first = row["head"], row["first"]
        places = entries.positions.expand(entries.kv_heads, -1)[kv]
        upright = observed.rope.unrotate(entries.keys[kv], places)
        weights = [
            torch.softmax(explicit(seen, row["layer"], head, query)[0], 0)[first : first + 2]
            for head in range(kv * group, (kv + 1) * group)
            for query in range(CHUNK)
        ]
        mass = torch.stack(weights).sum(0)
        place = places[first + int(mass[1] >= mass[0])]
        for rule in ("exact", "half", "true", "best"):
            weight = float(np.clip(row.get(rule, 0.5), 0, 1))
            key = observed.rope.rotate(
                (weight * upright[first] + (1 - weight) * upright[first + 1])[None], place[None]
            )[0]
            change = size = 0.0
            for head in range(kv * group, (kv + 1) * group):
                for query in range(CHUNK):
                    z, values, _ = explicit(seen, row["layer"], head, query)
                    own = observed.scaling * key @ observed.queries[head, N - CHUNK + query]
                    if observed.softcap is not None:
                        own = observed.softcap * torch.tanh(own / observed.softcap)
                    merged = torch.cat([z[:first], own[None] + np.log(2), z[first + 2 :]])
                    mean = values[first : first + 2].mean(0, keepdim=True)
                    held = torch.cat([values[:first], mean, values[first + 2 :]])
                    output = torch.softmax(z, 0) @ values
                    change += float((torch.softmax(merged, 0) @ held - output).square().sum())
                    size += float(output.square().sum())
            assert row[f"error_{rule}"] == pytest.approx((change / size) ** 0.5, rel=1e-6), rule
            assert row["error_best"] <= row[f"error_{rule}"] * (1 + 0.1)  # the grid's step aside


def test_pairs_are_those_that_kvslimmer_merges_and_the_heaviest(seen):
    older = N - CHUNK - SINKS
    for (layer, head), rows in seen.found.pairs.groupby(["layer", "head"]):
        entries, observed = seen.layers[layer]
        group = observed.heads // entries.kv_heads
        mass = torch.zeros(N, dtype=torch.float64)
        for member in range(head * group, (head + 1) * group):
            for query in range(CHUNK):
                weights = torch.softmax(explicit(seen, layer, member, query)[0], 0)
                mass[: len(weights)] += weights
        past = mass[SINKS : N - CHUNK]
        lightest = choose_pairs(past, older * CHUNK // (24 - SINKS)) + SINKS
        merged, heaviest = (set(rows.loc[rows["set"] == name, "first"]) for name in ("merged", "heaviest"))
        assert len(merged) == 4 and merged <= set(lightest.tolist())
        assert heaviest == {SINKS + int(first) for first in choose_pairs(-past, 4)}


def test_the_seed_decides_and_the_model_runs_on_as_before(tiny):
    model = tiny("llama", dtype=torch.float32)
    one, same, other = (
        hessian.measure(model, IDS, RETAIN, pairs=4, draws=16, seed=seed) for seed in (0, 0, 1)
    )
    pd.testing.assert_frame_equal(one.pairs, same.pairs)
    pd.testing.assert_frame_equal(one.draws, same.draws)
    assert not one.draws["first"].equals(other.draws["first"])
    with torch.inference_mode():
        model(IDS, cache=make_cache(model, "kvslimmer", retain=RETAIN))


def test_the_left_out_term_is_the_curvature_of_the_loss(tiny):
    """Against double backward through a plain forward: Uᵀ ∇²L U, all queries of the chunk and heads of the group."""
    model = tiny("llama")
    table = hessian.left_out(model, IDS, RETAIN, layers=2, pairs=2)
    assert table["layer"].unique().tolist() == [0, 2]
    layers, gradients = observe(model, IDS[:, :-1])[0], hessian.gradients(model, IDS, CHUNK)
    seen = SimpleNamespace(layers=layers, gradients=gradients)
    for _, row in table.iterrows():
        first, place = row["first"], row["layer"]
        along = torch.zeros(1, N, 4, 8, dtype=torch.float64)
        exact = 0.0
        for head in range(2):  # KV head 0 serves query heads 0 and 1
            for query in range(CHUNK):
                z, values, gradient = explicit(seen, place, head, query)
                weights, both = torch.softmax(z, 0), slice(first, first + 2)
                along[0, N - CHUNK + query, head] = weights[both] @ (values[both] - weights @ values)
                exact += float((output_curvature(weights, values)[both, both].sum((0, 1)) * gradient).sum())
        leaf = torch.zeros(1, N, 32, dtype=torch.float64, requires_grad=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (slope,) = torch.autograd.grad(loss_of(model, (place, leaf)), leaf, create_graph=True)
            (twice,) = torch.autograd.grad((slope * along.flatten(2)).sum(), leaf)
        assert row["first_term"] == pytest.approx(exact, rel=1e-9)
        expected = float((twice * along.flatten(2)).sum())
        assert row["second_term"] == pytest.approx(expected, rel=0.02, abs=1e-3 * float(along.square().sum()))


def test_a_text_without_a_past_is_refused(tiny):
    with pytest.raises(
        UserError, match="a text of 2 tokens leaves no pair before its last 1; give a longer one"
    ):
        hessian.measure(tiny("llama"), IDS[:, :3], 1.0)


@pytest.fixture
def made() -> hessian.Exactness:
    """Four pairs and four draws whose tables can be told by hand."""
    pairs = pd.DataFrame(
        {"set": "merged", "layer": 0, "head": 0, "first": [4, 8, 12, 16], "attention": 0.1,
         "true": [0.5, 0.25, 1.5, -1.0], "curvature": [1.0, -1.0, 1.0, -1.0], "exact": [0.4, 0.5, 0.5, 0.5],
         "diagonal": [0.4, 0.5, 0.5, 0.5], "mass": 0.5, "half": 0.5, "best": 0.5}
    )  # fmt: skip
    for rule in ("best", "true", *hessian.RULES):
        pairs[f"error_{rule}"] = 0.1
    pairs["error_half"] = 0.15
    draws = pd.DataFrame(
        {"set": "merged", "layer": [0, 0, 1, 1], "head": 0, "first": 4, "query": 0,
         "alpha1": [1e-5, 1e-5, 1e-3, 1e-5], "alpha2": 1e-6, "c11": [0.2, 0.2, -0.2, 0.2], "c22": [0.1, 0.1, -0.1, -0.1],
         "c12": [0.15, -0.15, -0.15, 0.1], "apart": [-0.2, 0.2, -0.2, -0.2]}
    )  # fmt: skip
    return hessian.Exactness(pairs, draws)


def test_the_tables_count_what_they_say(made):
    sound = made.soundness().loc["merged"]
    assert sound.tolist() == [4, 0.5, 0.5, 0.25]
    gaps = made.gaps().loc["merged"]
    assert gaps.loc["|exact - true|, where true is a minimum in [0, 1]", ["n", "median"]].tolist() == [
        1, pytest.approx(0.1)
    ]  # fmt: skip
    assert gaps.loc["|exact - true|", "median"] == pytest.approx(0.625)  # of 0.1, 0.25, 1, 1.5
    signs = made.signs().loc["merged"]
    assert signs["share with one sign"] == 0.5
    assert signs["share with one sign, another pair"] == 0.5
    assert made.alphas().loc["merged", "share ≤ 1e-4"] == 7 / 8
    assert made.errors().loc[("merged", "half"), "over the best, median"] == pytest.approx(1.5)
    angles = made.angles("layer").set_index(["layer", "kind"])
    assert angles.loc[(0, "distance c11, c22"), "median"] == pytest.approx(0.1)
    assert angles.loc[(1, "distance c11, c22"), "median"] == pytest.approx(0.2)
    assert angles.loc[(1, "−cos(E, c12)"), "n"] == 2
    text = made.reading()
    assert (
        "In 50% of the merged pairs its stationary point is a maximum, in 50% it lies outside [0, 1]" in text
    )
    assert "1.50 (half)" in text and "reach from −0.08 to +0.20" in text


def test_prompts_are_read_with_their_answers(tiny):
    from kvrepro.tasks.base import Sample

    class Letters:
        chat_template = bos_token_id = None

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) - 31 for letter in text]}

    samples = [
        Sample(f"s/{i}", "s", "code", text, ("fox",), "exact", 8, False, False)
        for i, text in enumerate(("the quick brown fox " * 3, "a lazy dog " * 5))
    ]
    model = tiny("llama")
    found = hessian.read(model, Letters(), samples, 200, RETAIN, pairs=3, draws=8)
    ids = torch.tensor([Letters()(samples[1].prompt + "fox")["input_ids"]])
    alone = hessian.measure(model, ids, RETAIN, pairs=3, draws=8)
    second = found.pairs[found.pairs["sample"] == "s/1"].drop(columns="sample").reset_index(drop=True)
    pd.testing.assert_frame_equal(second, alone.pairs)
