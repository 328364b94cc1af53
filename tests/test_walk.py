"""What the first two notebooks show is what the methods do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvrepro.hf import make_cache
from kvrepro.measure import walk
from kvrepro.methods import make
from kvrepro.tasks.base import Sample

RETAIN = 0.3
SAMPLE = Sample("s/0", "s", "code", "the quick brown fox " * 9, ("jumps over",), "exact", 8, False, False)


class Letters:
    """A tokenizer of one token a letter, without a chat template."""

    chat_template = bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 31 for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + 31) for token in ids)


@pytest.fixture(scope="module", params=["llama", "llama-mha"])
def seen(request, tiny) -> SimpleNamespace:
    """A tiny model and what its layers saw of SAMPLE."""
    model = tiny(request.param, dtype=torch.float32)
    return SimpleNamespace(
        model=model, walk=walk.read(model, Letters(), SAMPLE, 4096), mha=request.param == "llama-mha"
    )


def test_the_layers_saw_the_prompt_and_then_the_answer(seen):
    n, t = len(SAMPLE.prompt), len(SAMPLE.answers[0])
    assert seen.walk.input_ids.shape == (1, n)
    assert len(seen.walk.layers) == seen.model.config.num_hidden_layers
    for layer in seen.walk.layers:
        assert len(layer.entries) == len(layer.tokens) == layer.observed.queries.shape[1] == n
        assert len(layer.later) == layer.queries.shape[1] == t


def test_states_and_counts_are_those_of_the_compressed_layer(seen):
    layer = seen.walk.layer(1)
    n, m = len(layer.entries), layer.budget(RETAIN)
    held, found = make("selkv").compress(layer.entries, layer.observed, m)
    states = layer.states(RETAIN)
    for head in range(layer.entries.kv_heads):
        own = states[states["head"] == head].set_index("position")["state"]
        kept = held.positions.expand(layer.entries.kv_heads, -1)[head].tolist()
        assert own.index[own == "kept"].tolist() == kept
    fates = layer.fates(RETAIN)
    assert (fates["merged"] == states[states["state"] == "merged"].groupby("head").size()).all()
    assert (fates["evicted"] == n - m).all()
    assert fates[["no target in its bucket", "target, but gate 0", "merged"]].sum(axis=1).tolist() == [
        n - m
    ] * len(fates)
    assert (fates["evicted"] * fates["share routed"]).sum() / fates["evicted"].sum() == pytest.approx(
        found["share_routed"]
    )
    counts = layer.counts(RETAIN)["tokens"]
    if seen.mha:
        assert counts["kept by each KV head"] == m
    else:
        assert counts["kept by the layer"] == m
        assert counts["chosen by at least one of 2 KV heads (the union)"] == found["union_size"]


def test_the_bias_shown_is_the_one_that_attention_adds(seen):
    layer = seen.walk.layer(1)
    held, _ = make("selkv").compress(layer.entries, layer.observed, layer.budget(RETAIN))
    table = layer.ratios(RETAIN, rows=5)
    bias = dict(zip(held.positions[0].tolist(), held.bias[0].tolist()))
    assert table["bias"].max() == pytest.approx(max(bias.values())) and table["bias"].max() > 0
    for position, row in table.iterrows():
        each = row[[name for name in row.index if name.startswith("R, head")]].astype(float)
        assert row["bias"] == pytest.approx(bias[position], rel=1e-5)
        assert row["bias"] == pytest.approx(
            0.5 * torch.tensor(each.to_numpy()).mean().log().item(), rel=1e-4, abs=1e-6
        )


def test_attention_at_each_stage_is_a_softmax_over_what_is_held(seen):
    layer = seen.walk.layer(2)
    n, t, group = len(layer.entries), len(layer.later), 4 // layer.entries.kv_heads
    keys = torch.cat([layer.entries.keys, layer.later.keys], 1).repeat_interleave(group, 0)  # [H, n + t, D]
    logits = layer.queries @ keys.transpose(1, 2) * layer.observed.scaling
    seen_by = torch.ones(t, n + t, dtype=torch.bool).tril(n)
    full = logits.masked_fill(~seen_by, -torch.inf).softmax(-1).mean((0, 1))  # [n + t]

    along = layer.attention(RETAIN).pivot(index="position", columns="variant", values="mass")
    assert along["full"].to_numpy() == pytest.approx(full[:n].numpy(), abs=1e-6)
    assert along["merged"].equals(along["evicted"])  # keys are not merged
    assert not along["compensated"].equals(along["evicted"])
    states = layer.states(RETAIN)
    anywhere = set(states.loc[states["state"] == "kept", "position"])
    assert set(along.index[along["evicted"] > 0]) == anywhere

    losses = layer.losses(RETAIN)
    assert losses.loc["full", ["mass in the wrong bucket", "error of the output"]].tolist() == [0, 0]
    assert losses.loc["evicted", "attention on the prompt"] == pytest.approx(along["evicted"].sum())
    assert losses.loc["merged", "error of the output"] != losses.loc["evicted", "error of the output"]


def test_overview_and_reading_tell_of_every_layer(seen):
    overview = seen.walk.overview(RETAIN)
    fates = seen.walk.layer(0).fates(RETAIN)
    assert len(overview) == len(seen.walk.layers)
    routed = fates["target, but gate 0"].sum() + fates["merged"].sum()
    assert overview.loc[0, "share_routed"] == pytest.approx(routed / fates["evicted"].sum())
    assert f"{overview.loc[0, 'share_routed']:.0%} of the evicted tokens find a target" in seen.walk.reading(
        0, RETAIN
    )


def test_adjacent_keys_are_compared_before_the_rotation(seen):
    found = seen.walk.adjacent().query("layer == 0 and kind == 'key'")["cosine"]
    attention = seen.model.model.layers[0].self_attn
    with torch.inference_mode():
        hidden = seen.model.model.layers[0].input_layernorm(
            seen.model.model.embed_tokens(seen.walk.input_ids)
        )
        keys = attention.k_proj(hidden)[0].view(hidden.shape[1], -1, attention.head_dim).transpose(0, 1)
    expected = torch.cosine_similarity(keys[:, :-1], keys[:, 1:], dim=-1)
    assert found.to_numpy() == pytest.approx(expected.flatten().numpy(), abs=1e-4)


def test_watching_kvslimmer_does_not_change_it(seen):
    slim = walk.slim(seen.model, seen.walk.input_ids, RETAIN)
    n = seen.walk.input_ids.shape[1]
    cache = make_cache(seen.model, "kvslimmer", retain=RETAIN)
    with torch.inference_mode():
        seen.model(seen.walk.input_ids, cache=cache)
    for index, layer in enumerate(cache.compressed_layers()):
        entries = layer.prompt[0].entries
        own = slim.entries[slim.entries["layer"] == index]
        assert own["cardinality"].tolist() == entries.mass.flatten().tolist()
        assert own["position"].tolist() == entries.positions.flatten().tolist()
    assert (slim.entries.groupby(["layer", "head"])["cardinality"].sum() == n).all()
    merges = sum(layer.prompt[0].diagnostics["merges"] for layer in cache.compressed_layers())
    assert len(slim.pairs) == slim.counts.loc["all merges", "pairs"] == merges
    assert slim.chunks["tokens"].sum() == n
    assert slim.chunks["merged away"].sum() * len(slim.entries.groupby(["layer", "head"])) == merges
    alone = slim.pairs[slim.pairs["composite"]]
    assert (alone["exact"] == alone["mass"]).all()
    assert slim.pairs[["exact", "diagonal", "mass"]].stack().between(0, 1).all()
    assert slim.gaps().loc["|exact - diagonal|", "99 %"] > 0
