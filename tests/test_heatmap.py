"""What became of each token is what the cache holds, and the page that shows it is one file that obeys no text."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrepro import heatmap, notebooks
from kvrepro.errors import UserError
from kvrepro.hf import Arm, KVCache, prefill
from kvrepro.measure.fates import DROPPED, Fates, _traced, trace
from kvrepro.measure.observe import observe
from kvrepro.methods import Budget, available, make
from kvrepro.methods.base import Method

N, RETAIN = 72, 0.3
# Positions of these do not name tokens: the released code contracts them.
NAMED = [name for name in available() if name != "kvslimmer-released"]
EVICTING = (
    "streaming-llm",
    "h2o",
    "vatp",
    "snapkv",
    "pyramidkv",
    "bifocal",
    "selkv/evict",
    "kvslimmer/drop-lighter",
)
MERGING = ("selkv", "selkv/merge-all", "selkv/on-bifocal", "look-m", "weightedkv", "kvmerger", "adjacent")


def arm(name: str, **budget: Any) -> Arm:
    return Arm(make(name), Budget(**(budget or {"retain": RETAIN})))


@pytest.fixture(scope="module", params=["llama", "llama-mha"])
def prompt(request: Any, tiny: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return tiny(request.param), torch.randint(1, 97, (1, N))


def prefilled(model: Any, ids: torch.Tensor, one: Arm) -> KVCache:
    cache = KVCache(model, [one])
    with torch.no_grad():
        prefill(model, cache, ids)
        model(ids[:, cache.get_seq_length() :], cache=cache)
    return cache


@pytest.mark.parametrize(
    "name", [*NAMED, "selkv/evict", "kvslimmer/drop-lighter", "kvslimmer-released/as-printed"]
)
def test_what_is_kept_is_what_the_cache_reports(prompt: Any, name: str) -> None:
    model, ids = prompt
    (found,) = trace(model, ids, [arm(name)])
    cache = prefilled(model, ids, arm(name))
    assert found.layers == [0, 1, 2] and found.target.shape == (
        3,
        2 if model.config.num_key_value_heads == 2 else 4,
        N,
    )
    for index, (layer, line) in enumerate(zip(cache.compressed_layers(), cache.report(), strict=True)):
        row = layer.unstacked()[0]
        for head, kept in enumerate(found.kept[index]):
            there = torch.ones(len(row.entries), dtype=torch.bool)
            bias = torch.zeros(len(row.entries), dtype=torch.float64)
            if row.entries.bias is not None:
                bias = row.entries.bias.expand(len(found.kept[index]), -1)[head]
                there = bias > -torch.inf
            held = line["positions"].expand(len(found.kept[index]), -1)[head][there]
            assert np.flatnonzero(kept).tolist() == held.tolist()
            np.testing.assert_allclose(found.bias[index, head, held], bias[there])
        assert found.kept[index].sum(1).max() == line["entries"]
    assert (found.kept.astype(int) + found.merged + found.dropped == 1).all()
    if name in EVICTING:
        assert not found.merged.any()


@pytest.mark.parametrize("name", MERGING)
def test_a_token_is_in_the_entry_that_changes_with_its_value(prompt: Any, name: str) -> None:
    """The same by brute force: each token's value is moved a little, and the entries are compared."""
    model, ids = prompt
    entries, observed = observe(model, ids)[0][1]
    method, m = make(name), Budget(retain=RETAIN).resolve(N)
    held, _, target, named = _traced(method, entries, observed, m)
    base = method.compress(entries, replace(observed, _memo={}), m)[0]
    torch.testing.assert_close(held.values, base.values, rtol=0, atol=1e-12)
    reached = 0
    for j in range(N):
        values = entries.values.clone()
        values[:, j] *= 1 + 1e-6
        moved = method.compress(replace(entries, values=values), replace(observed, _memo={}), m)[0]
        assert torch.equal(moved.positions, base.positions)
        changed = (moved.values - base.values).abs().amax(-1) > 1e-13  # [Hkv, m]
        for head, slots in enumerate(changed):
            own = int(target[head, j])
            assert set(slots.nonzero().flatten().tolist()) <= {own}  # none where it was dropped
            reached += bool(slots.any()) and named[head, own] != j
    merged = int((target >= 0).sum() - (named >= 0).sum())
    assert 0.9 * merged <= reached <= merged > 0  # a weight may be too small to be felt


@pytest.mark.parametrize("name", ["kvslimmer", "asymkv", "kvslimmer-released/as-printed", "adjacent"])
def test_as_many_tokens_are_in_an_entry_as_it_counts(prompt: Any, name: str) -> None:
    model, ids = prompt
    (found,) = trace(model, ids, [arm(name)])
    for index, layer in enumerate(prefilled(model, ids, arm(name)).compressed_layers()):
        mass = layer.prompt[0].entries.mass
        for head, target in enumerate(found.target[index]):
            counts = np.unique(target, return_counts=True)[1]
            assert counts.tolist() == mass[head].tolist() and counts.sum() == N
            runs = target[np.flatnonzero(np.diff(target, prepend=-1))]
            assert len(runs) == len(counts)  # neighbours merge, so an entry is a stretch of the text


def test_arms_that_share_a_prefill_are_followed_as_if_alone(prompt: Any) -> None:
    model, ids = prompt
    arms = [
        arm("kvslimmer"),
        arm("selkv"),
        arm("snapkv"),
        arm("selkv", entries=9),
        arm("full"),
        arm("asymkv"),
    ]
    for one, found in zip(arms, trace(model, ids, arms), strict=True):
        (alone,) = trace(model, ids, [one])
        assert np.array_equal(found.target, alone.target) and np.array_equal(found.bias, alone.bias)


def test_moved_keys_are_followed_by_the_tokens_they_come_from(prompt: Any) -> None:
    model, ids = prompt
    still, moved = trace(model, ids, [arm("selkv"), arm("selkv/reposition")])
    assert np.array_equal(still.target, moved.target)
    (released,) = trace(model, ids, [arm("kvslimmer-released")])
    assert (released.kept.sum(2) == Budget(retain=RETAIN).resolve(N)).all() and released.merged.any()


def test_a_prompt_that_fits_is_kept_whole_and_half_precision_is_followed_too(tiny: Any) -> None:
    ids = torch.randint(1, 97, (1, N))
    model = tiny("llama", dtype=torch.bfloat16)
    for name in ("full", "selkv", "kvslimmer", "asymkv"):
        assert trace(model, ids, [arm(name, retain=1.0)])[0].kept.all()
    for name in ("selkv", "kvslimmer", "kvmerger"):
        (found,) = trace(model, ids, [arm(name)])
        lines = prefilled(model, ids, arm(name)).report()
        assert [int(x) for x in found.kept.sum(2).max(1)] == [line["entries"] for line in lines]
    with torch.inference_mode():
        assert trace(model, ids.clone(), [arm("selkv")])[0].merged.any()


def test_layers_with_a_sliding_window_are_left_out(tiny: Any) -> None:
    model, ids = tiny("gemma3"), torch.randint(1, 97, (1, 40))
    assert trace(model, ids, [arm("selkv")])[0].layers == [1]
    with pytest.raises(UserError, match="sliding window"):
        trace(tiny("gemma3", layer_types=["sliding_attention"] * 3), ids, [arm("selkv")])


def test_a_method_that_spreads_a_token_is_refused(prompt: Any) -> None:
    @dataclass(frozen=True)
    class Smooth(Method):
        name = "smooth"

        def compress(self, entries: Any, observed: Any, m: int) -> Any:
            mixed = (entries.values + entries.values.roll(1, 1)) / 2
            return replace(entries, values=mixed).take(torch.arange(m)), {}

    with pytest.raises(UserError, match="smooth spreads a token over several entries"):
        trace(*prompt, [Arm(Smooth(), Budget(retain=RETAIN))])


# The page

TOKENS = [
    "<b>",
    "A & B",
    ' "quoted"',
    "\n",
    "\t",
    "\u202eevil",
    "é",
    "</span></div><script>alert(1)</script>",
    "",
    " end",
]
TARGET = np.array([[[0, 0, 2, 2, -1, -1, 6, 6, 2, 9], [0, -1, 2, 2, -1, 6, 6, 9, -1, 9]]])
FATES = Fates([3], TARGET, np.where(np.arange(10) == TARGET, 0.25, 0.0))


class Reader(HTMLParser):
    """Tags with their attributes, and the text of the token spans."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[dict[str, Any]] = []
        self.inside, self.depth = False, 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "div" and dict(attributes).get("class") == "text":
            self.inside = True
        elif tag == "span" and self.inside:
            self.spans.append({**dict(attributes), "text": ""})

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "div"

    def handle_data(self, data: str) -> None:
        if self.inside and self.spans:
            self.spans[-1]["text"] += data


@pytest.fixture(scope="module")
def page() -> str:
    panels = [heatmap.Panel("selkv", FATES, "An <i>answer</i>"), heatmap.Panel("snapkv", FATES)]
    return heatmap.page(TOKENS, panels, title="Title & <more>", lead="A 'lead'")


def test_every_token_stands_there_once_in_each_panel_and_no_text_is_obeyed(page: str) -> None:
    read = Reader(page)
    shown = [span["text"] for span in read.spans]
    assert len(shown) == 2 * len(TOKENS)
    assert shown[:10] == [
        "<b>", "A & B", ' "quoted"', "↵\n", "\t", "\\u202eevil", "é", "</span></div><script>alert(1)</script>", "∅", " end",
    ]  # fmt: skip
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert (
        "<b>" not in page
        and "<i>answer" not in page
        and "alert(1)</script>" not in page
        and "\u202e" not in page
    )
    assert "Title &amp; &lt;more&gt;" in page and "A &#x27;lead&#x27;" in page
    assert [read.spans[0]["title"], read.spans[1]["title"], read.spans[7]["title"]] == [
        "0: kept 100%, merged 0%, dropped 0%; mean bias +0.25",
        "1: kept 0%, merged 50%, dropped 50%; mostly into 0 “<b>” (100% of its merges)",
        "7: kept 0%, merged 100%, dropped 0%; mostly into 6 “é” (50% of its merges)",
    ]
    assert read.spans[1]["data-into"] == "0" and "data-into" not in read.spans[4]
    assert read.spans[1]["style"] == "--k:0;--m:50"


def test_it_needs_nothing_outside_itself(page: str) -> None:
    for tag, attributes in Reader(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "a")
        assert not {"src", "href", "srcset", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|//\w|@import|url\(", page.replace("data-", ""))
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_the_script_is_given_the_same_fates(page: str) -> None:
    sections = [attributes for tag, attributes in Reader(page).tags if tag == "section"]
    for section in sections:
        hops, bias = (
            np.frombuffer(zlib.decompress(base64.b64decode(str(section[name]))), "<i4").reshape(TARGET.shape)
            for name in ("data-hops", "data-bias")
        )
        target = np.where(hops == heatmap.HOPS["dropped"], DROPPED, hops + np.arange(10))
        assert np.array_equal(target, TARGET) and np.allclose(bias * heatmap.BIAS_UNIT, FATES.bias)


def test_shares_and_the_favourite_target_are_those_of_the_cells() -> None:
    table = FATES.table()
    assert np.allclose(table[["kept", "merged", "dropped"]].sum(1), 1)
    assert table["kept"].mean() == FATES.kept.mean() and table["dropped"].mean() == FATES.dropped.mean()
    assert table["into"].tolist() == [-1, 0, -1, 2, -1, 6, -1, 6, 2, -1]
    assert table["bias"].tolist()[:3] == pytest.approx([0.25, np.nan, 0.25], nan_ok=True)


def test_a_long_prompt_makes_no_huge_page(prompt: Any) -> None:
    model, _ = prompt
    ids = torch.randint(1, 97, (1, 1500))
    found = trace(model, ids, [arm("snapkv"), arm("kvslimmer")])
    panels = [heatmap.Panel(name, fates) for name, fates in zip(("snapkv", "kvslimmer"), found, strict=True)]
    size = len(heatmap.page(["word "] * 1500, panels, title="t").encode())
    assert size < 2 * 1500 * 220 + 12_000  # bytes a token and panel, and the frame


def test_tokens_are_cut_as_they_stand_in_the_text(smollm2: Any) -> None:
    tokenizer = smollm2[1]
    text = "One  word,\n\ttwo naïve words: 🍊 <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    shown = heatmap.token_texts(tokenizer, ids)
    assert len(shown) == len(ids)
    # A character of several tokens has no text in any of them.
    assert re.sub("\ufffd+", "🍊", "".join(shown)) == text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: the page's script is not run")
def test_the_script_runs_in_a_browser(page: str, tmp_path: Path) -> None:
    clicks = """<script>setTimeout(() => {
      const layer = document.getElementById("layer"); layer.selectedIndex = 1; layer.onchange();
      document.querySelectorAll(".text span")[3].click();
    }, 1000)</script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", clicks), encoding="utf-8")
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    words += ["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert "CONSOLE" not in done.stderr
    read = Reader(done.stdout)
    assert "hidden" not in dict(read.tags)["form"]
    spans = read.spans[:10]
    assert [span["title"] for span in spans[:4]] == [
        "0: kept, bias +0.25", "1: merged into 0 “<b>”", "2: kept, bias +0.25", "3: merged into 2 “ \"quoted\"”",
    ]  # fmt: skip
    assert spans[4]["title"] == "4: dropped" and "--k: 0; --m: 0" in spans[4]["style"]
    assert spans[3]["class"] == "at" and spans[2]["class"] == "goal"
    assert "3: merged into 2" in done.stdout.split("<output")[1]


def test_a_notebook_shows_the_page_in_a_frame_and_saves_it_where_told(
    page: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path / "notebooks")
    for folder in ("", "figures"):
        tags = Reader(notebooks.framed(page, "mine", folder)).tags
        assert dict(tags)["iframe"]["srcdoc"] == page
        assert [attributes["href"] for tag, attributes in tags if tag == "a"] == [
            f"../{folder}/mine.html"
        ] * bool(folder)
    assert (tmp_path / "figures" / "mine.html").read_text(encoding="utf-8") == page
