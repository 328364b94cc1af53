"""A prompt as a heat map of its tokens, in one HTML file: what each method kept, merged (into which) and dropped.

The page needs no network and no other file.  Without scripts it shows the average over all layers and KV heads, which is plain
HTML; a short script lets one pick a single layer and KV head, and points from a merged token to where it went.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from .measure.fates import DROPPED, Fates
from .plots import look
from .plots.inside import STATES

HOPS = {
    "kept": 0,
    "dropped": 2**31 - 1,
}  # in the script's numbers; any other is the way to the token merged into
BIAS_UNIT = 0.001


@dataclass(frozen=True)
class Panel:
    """One method on the page: its arm, what became of the tokens, and a remark (its answer, say) under the name."""

    arm: str
    fates: Fates
    remark: str = ""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as it stands in the text: behind another one, since SentencePiece drops the blank of a first word."""
    anchor = ids[0]
    skip = len(tokenizer.decode([anchor]))
    return [tokenizer.decode([anchor]), *(tokenizer.decode([anchor, token])[skip:] for token in ids[1:])]


def page(tokens: Sequence[str], panels: Sequence[Panel], *, title: str, lead: str = "") -> str:
    """The whole page.

    Parameters
    ----------
    tokens
        The prompt's n tokens as text.
    panels
        One a method, all of the same prompt.
    title, lead
        Headline, and a paragraph under it.  These, tokens and remarks are text: whatever HTML they hold is shown, not obeyed.

    Returns
    -------
    str
        HTML with its style and script inside.
    """
    parts = [panel_html(tokens, panel) for panel in panels]
    layers, heads = panels[0].fates.layers, panels[0].fates.target.shape[1]
    cells = len(layers) * heads
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{f"<p>{escape(lead)}</p>" if lead else ""}
<p>Every layer and KV head holds its own entries: {len(layers)} layers × {heads} KV heads = {cells} cells. The tint says
in how many of them a token still has an entry of its own; the bar below it, what became of it in all of them.
Hover over a token, or tap it, for the numbers; a frame marks the token that it merged into most often.</p>
<p class="legend" aria-label="Legend">
<span style="--k:100;--m:0">kept everywhere</span>
<span style="--k:50;--m:0">kept in half of the cells</span>
<span style="--k:0;--m:100">merged into another token's entry</span>
<span style="--k:30;--m:30">some of each</span>
<span style="--k:0;--m:0">dropped everywhere</span>
</p>
<form id="pick" hidden>
<label>Layer <select id="layer"><option value="">average of all</option>{_options(layers)}</select></label>
<label>KV head <select id="head" disabled>{_options(range(heads))}</select></label>
</form>
{"".join(parts)}
</main>
<output id="told" aria-live="polite" hidden></output>
<script>{SCRIPT}</script>
</body>
</html>
"""


def panel_html(tokens: Sequence[str], panel: Panel) -> str:
    """A method's section: name, shares, remark, and the tokens."""
    fates, found = panel.fates, look(panel.arm)
    table = fates.table()
    spans = "".join(_span(tokens, *row) for row in table.itertuples(name=None))
    return f"""<section data-hops="{_packed(_hops(fates))}" data-bias="{_packed(np.rint(fates.bias / BIAS_UNIT))}">
<h2><i style="background:{found.color}"></i>{escape(found.label)}</h2>
<p>{escape(_summary(fates, table))}</p>
{f"<blockquote>{escape(panel.remark)}</blockquote>" if panel.remark else ""}
<div class="text">{spans}</div>
</section>
"""


def _options(numbers: Iterable[int]) -> str:
    return "".join(f"<option>{number}</option>" for number in numbers)


def _summary(fates: Fates, table: pd.DataFrame) -> str:
    shares = table[["kept", "merged", "dropped"]].mean()
    lost = float((fates.dropped.all((0, 1))).mean())
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    text = f"Of all tokens, over all cells: {text}" + (
        f"; {lost:.0%} of them are dropped in every cell." if lost else "."
    )
    biased = fates.bias[fates.kept]
    return text + (
        f" Mean bias of an entry {biased.mean():+.2f}, largest {biased.max():+.2f}." if biased.any() else ""
    )


def _span(
    tokens: Sequence[str],
    j: int,
    kept: float,
    merged: float,
    dropped: float,
    into: int,
    share: float,
    bias: float,
) -> str:
    says = f"{j}: kept {kept:.0%}, merged {merged:.0%}, dropped {dropped:.0%}"
    points = ""
    if into != DROPPED:
        says += f"; mostly into {into} {_quoted(tokens[into])} ({share:.0%} of its merges)"
        points = f' data-into="{into}"'
    if bias:  # NaN, where it is never kept, is true, too
        says += f"; mean bias {bias:+.2f}" if kept else ""
    style = f"--k:{kept * 100:.3g};--m:{merged * 100:.3g}"
    return f'<span style="{style}" title="{escape(says)}"{points}>{escape(_visible(tokens[j]))}</span>'


def _visible(text: str) -> str:
    """Line breaks marked, and what has no shape of its own (controls, marks that turn the direction) as an escape."""
    shown = "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )
    return shown.replace("\n", "↵\n") or "∅"


def _quoted(text: str) -> str:
    shown = _visible(text).replace("\n", "")
    return f"“{shown}”"


def _hops(fates: Fates) -> np.ndarray:
    """For the script: how far each token went, [L, Hkv, n]; close neighbours make small numbers, which pack well."""
    hops = fates.target - np.arange(fates.target.shape[-1])
    return np.where(fates.dropped, HOPS["dropped"], hops)


def _packed(numbers: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(numbers.astype("<i4").tobytes(), 9)).decode()


STYLE = f"""
:root {{ --paper: #fff; --ink: #1b1b1b; --soft: #565656; --line: #ccc; --tint: 0 114 178; --bar: {STATES["kept"]};
  --merged: #d98200; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #15181c; --ink: #ececec; --soft: #b0b5bb; --line: #454b52; --tint: 86 180 233; --bar: #56b4e9;
    --merged: {STATES["merged"]}; }}
}}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }}
main {{ max-width: 60rem; margin: 0 auto; padding: 1rem 1rem 5rem }}
h1 {{ font-size: 1.4rem; line-height: 1.25 }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .25rem }}
h2 i {{ display: inline-block; width: .75em; height: .75em; margin-right: .5em; border: 1px solid var(--soft);
  border-radius: 50% }}
p {{ margin: .5rem 0 }}
section p {{ color: var(--soft) }}
blockquote {{ margin: .5rem 0; padding: .25rem .75rem; border-left: 3px solid var(--line); white-space: pre-wrap;
  overflow-wrap: anywhere }}
section {{ scroll-margin-top: 4rem }}
form {{ position: sticky; top: 0; z-index: 1; padding: .5rem 0; background: var(--paper);
  border-bottom: 1px solid var(--line) }}
label {{ margin-right: 1rem }}
select {{ font: inherit; max-width: 10rem; background: var(--paper); color: var(--ink); border: 1px solid var(--soft) }}
.text {{ padding: .75rem; border: 1px solid var(--line); border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 14px/2.1 ui-monospace, Menlo, Consolas, monospace; tab-size: 4 }}
.text span, .legend span {{ padding: .15em 0 .3em; -webkit-box-decoration-break: clone; box-decoration-break: clone;
  background-color: rgb(var(--tint) / calc(var(--k) * .0045));
  background-image: linear-gradient(90deg, var(--bar) calc(var(--k) * 1%), var(--merged) 0 calc((var(--k) + var(--m)) * 1%),
    transparent 0);
  background-size: 100% 4px; background-position: 0 100%; background-repeat: no-repeat;
  box-shadow: inset -1px 0 var(--paper) }}
.legend {{ display: flex; flex-wrap: wrap; gap: .5rem 1rem; font-size: .9rem }}
.legend span {{ padding: .15em .5em .4em; border: 1px solid var(--line) }}
.text .at {{ outline: 2px solid var(--ink); outline-offset: -1px }}
.text .goal {{ outline: 3px solid var(--merged); outline-offset: -1px }}
output {{ position: fixed; bottom: 0; left: 0; right: 0; padding: .6rem 1rem; background: var(--ink); color: var(--paper);
  font-size: .9rem; overflow-wrap: anywhere }}
output[hidden], form[hidden] {{ display: none }}
"""

SCRIPT = """
(async () => {
  const panels = [...document.querySelectorAll("section")], told = document.getElementById("told");
  const layer = document.getElementById("layer"), head = document.getElementById("head");
  const heads = head.options.length, marked = [];
  const unpacked = async text => new Int32Array(await new Response(new Blob([Uint8Array.from(atob(text),
    char => char.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());

  for (const event of ["mouseover", "click"]) document.addEventListener(event, ({target: token}) => {
    while (marked.length) marked.pop().classList.remove("at", "goal");
    told.hidden = !token.matches(".text span");
    if (told.hidden) return;
    told.textContent = token.title;
    const mark = (other, name) => { other.classList.add(name); marked.push(other); };
    mark(token, "at");
    if (token.dataset.into) mark(token.parentNode.children[token.dataset.into], "goal");
  });

  for (const panel of panels) {
    panel.tokens = [...panel.querySelectorAll(".text span")];
    panel.average = panel.tokens.map(({title, style, dataset}) => [style.cssText, title, dataset.into]);
    panel.hops = await unpacked(panel.dataset.hops);
    panel.bias = await unpacked(panel.dataset.bias);
  }
  const single = (panel, j) => {
    const n = panel.tokens.length, at = ((layer.selectedIndex - 1) * heads + head.selectedIndex) * n + j;
    const hop = panel.hops[at], into = j + hop, bias = panel.bias[at] * UNIT;
    if (hop == DROPPED) return ["--k:0;--m:0", j + ": dropped"];
    if (hop) return ["--k:0;--m:100", j + ": merged into " + into + " “" + panel.tokens[into].textContent + "”", into];
    return ["--k:100;--m:0", j + ": kept" + (bias ? ", bias " + (bias > 0 ? "+" : "") + bias.toFixed(2) : "")];
  };
  const draw = () => {
    head.disabled = !layer.value;
    for (const panel of panels) panel.tokens.forEach((token, j) => {
      const [style, title, into] = layer.value ? single(panel, j) : panel.average[j];
      token.style.cssText = style; token.title = title;
      if (into === undefined) delete token.dataset.into; else token.dataset.into = into;
    });
  };
  document.getElementById("pick").hidden = false;
  layer.onchange = head.onchange = draw;
  draw();
})();
""".replace("UNIT", str(BIAS_UNIT)).replace("DROPPED", str(HOPS["dropped"]))
