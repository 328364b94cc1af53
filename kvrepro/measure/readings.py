"""What a table says, in tables for people and in sentences: no verdict is typed by hand (:mod:`kvrepro.claims`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from .. import analyses, claims, plots, published, results
from ..claims import Claim, Judged, better
from ..explain import explain
from ..plots.canvas import count
from ..tasks.base import CATEGORIES

# SelKV's diagnostics, as a reader finds them in a table.
MECHANICS = {
    "union_size": "union before the trim",
    "share_routed": "share of evicted tokens with a target",
    "mean_gate": "mean gate of those",
    "floored": "kept tokens without attention",
    "log_ratio_mean": "log R, mean",
    "log_ratio_p90": "log R, 90 %",
    "log_ratio_max": "log R, largest",
}


MERGE_PAYS = better(
    "KVSlimmer's merge beats dropping the lighter of each pair", "kvslimmer", "kvslimmer/drop-lighter"
)
# What notebooks judge, by section: claims of the papers by their id in data/claims.yaml, and choices that none states.
CLAIMS: dict[str, tuple[str | Claim, ...]] = {
    "main": ("selkv-above-snapkv", "kvslimmer-above-streaming-llm"),
    "plugin": ("selkv-above-own-eviction", "selkv-plug-in"),
    "gate": ("merging-all-hurts", "gate-helps", "gate-alone-loses", "selkv-above-own-eviction"),
    "bias": (
        "compensation-needed",
        "counts-hurt",
        "ratio-above-count",
        better("half of log R beats the whole of it", "selkv", "selkv/alpha-1"),
    ),
    "hessian": (
        "exact-above-diagonal",
        better("the exact rule beats weighting keys by attention", "kvslimmer", "kvslimmer/mass"),
        better("the exact rule beats the mean of the keys", "kvslimmer", "kvslimmer/mean"),
        MERGE_PAYS,
    ),
    "values": (
        better("values need the cardinality: a sum without it is worse", "kvslimmer", "kvslimmer/plain-sum"),
        better("values need the cardinality: a plain mean without it is worse", "kvslimmer", "kvslimmer/plain-mean"),
        better("values are summed, not weighted by attention", "kvslimmer", "kvslimmer/mass-values"),
        better("values are treated otherwise than keys", "kvslimmer", "kvslimmer/as-key"),
    ),
    "released": (
        better("the equations as printed beat the released code", "kvslimmer", "kvslimmer-released"),
        better(
            "without its lost tokens the released code is better",
            "kvslimmer-released/disjoint-pairs",
            "kvslimmer-released",
        ),
        "kvslimmer-above-asymkv",
    ),
    "gradient": ("kvslimmer-above-asymkv", "gradient-free"),
    "merging": (
        "selkv-above-own-eviction",
        MERGE_PAYS,
        better("AsymKV's merge beats dropping the lighter of each pair", "asymkv", "kvslimmer/drop-lighter"),
        "selkv-above-look-m",
        "selkv-above-pyramidkv",
    ),
    "selectors": (
        better("Bifocal's eviction beats SelKV as printed", "bifocal", "selkv"),
        better("Bifocal's eviction beats SnapKV", "bifocal", "snapkv"),
        better("SelKV's merge and bias help on Bifocal's kept set", "selkv/on-bifocal", "bifocal"),
        better("evicting beats merging adjacent tokens", "bifocal", "adjacent"),
    ),
    "positions": (
        better("true positions are better for StreamingLLM", "streaming-llm", "streaming-llm/reindexed"),
        better("true positions are better for SelKV", "selkv", "selkv/reposition"),
    ),
    "retention": ("selkv-robust-retention", "selkv-works-at-10", "selkv-above-full-at-80"),
    "slimmer-bias": (
        better("the count itself is right: clamping it at 5 is worse", "kvslimmer", "kvslimmer/clamped"),
        better("the count beats SelKV's attention ratio", "kvslimmer", "kvslimmer/ratio"),
        better("the count beats the whole attention ratio", "kvslimmer", "kvslimmer/ratio-alpha-1"),
        better("merged slots need a bias at all", "kvslimmer", "kvslimmer/no-bias"),
    ),
}  # fmt: skip


def judge(
    frame: pd.DataFrame,
    name: str,
    metrics: Sequence[str] = ("score", "kl"),
    *,
    n_boot: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Hold claims against the records.

    Parameters
    ----------
    frame
        Records at one retention.
    name
        A key of ``CLAIMS``.
    metrics
        Each claim is judged by each; the papers report scores.

    Returns
    -------
    DataFrame
        ``claim, metric, arm, baseline, diff, low, high, n, se, detectable, verdict, published``; diff is arm minus
        baseline, published the papers' own differences in score ("" where there are none).
    """
    rows, known = [], claims.load()
    for item in CLAIMS[name]:
        claim = known[item] if isinstance(item, str) else item
        table = claims.held(frame, claim, metrics, n_boot=n_boot, seed=seed)
        table.insert(0, "claim", claim.claim)
        table["published"] = [claim.told() if metric == "score" else "" for metric in table["metric"]]
        rows.append(table)
    return pd.concat(rows, ignore_index=True)


def reading(frame: pd.DataFrame, *names: str) -> str:
    """Markdown: a caution where the samples are few, then every claim of ``names`` with its verdict."""
    judged = pd.concat([judge(frame, name) for name in names], ignore_index=True)
    return caution(frame) + sentences(judged)


def caution(frame: pd.DataFrame, least: int = 18) -> str:
    """A sentence where the samples are too few for intervals, which take two of each of the nine offline tasks."""
    n = frame["sample"].nunique()
    if n >= least:
        return ""
    return f"**Only {n} samples: these numbers show that everything runs, nothing else.**\n\n"


def sentences(judged: pd.DataFrame) -> str:
    """One Markdown bullet a claim: its verdict by each metric, with the difference and its interval."""
    lines = []
    for claim, rows in judged.groupby("claim", sort=False):
        parts = [
            f"{_name(row['metric'])} {_difference(row)}: **{row['verdict']}**{_missed(row)}"
            for _, row in rows.iterrows()
        ]
        first = rows.iloc[0]
        pair = f"{plots.look(first['arm']).label} minus {plots.look(first['baseline']).label}"
        told = next((row["published"] for _, row in rows.iterrows() if row["published"]), "")
        beside = f" The papers' own difference in score: {told}." if told else ""
        lines.append(f"- *{claim}* ({pair}, n = {first['n']}). " + "; ".join(parts) + "." + beside)
    return "\n".join(lines)


def verdict(judged: Judged) -> str:
    """A claim's verdict in words: one where all measures agree, else by each; why not where it was not tested."""
    found = judged.verdicts
    if not found:
        return f"not tested here: {judged.why}"
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{verdict} by {_name(metric)}" for metric, verdict in found.items())


def evidence(judged: Judged) -> str:
    """What was measured for a claim: by each metric the case that decides, with its interval (and, where that spans zero,
    the true difference that so many samples would show), and the samples."""
    parts = []
    for metric in judged.verdicts:
        row, cases = judged.weakest(metric), int((judged.cases["metric"] == metric).sum())
        where = f" {row['case']}" + f" (weakest of {cases})" * (cases > 1) if row["case"] else ""
        parts.append(f"{_name(metric)} {_difference(row)}{_reach(row)}{where}")
    return "; ".join([*parts, *_samples(judged)]) or "–"


def _samples(judged: Judged) -> list[str]:
    n = judged.cases["n"].dropna().astype(int)
    return [] if n.empty else [f"n = {n.min()}" if n.min() == n.max() else f"n = {n.min()} to {n.max()}"]


def claimed(judged: Sequence[Judged]) -> pd.DataFrame:
    """Claims for reading: ``paper, claim, published, ours, verdict``."""
    columns = {
        "paper": [one.claim.paper for one in judged],
        "claim": [one.claim.claim for one in judged],
        "published": [one.claim.told() or "–" for one in judged],
        "ours": [evidence(one) for one in judged],
        "verdict": [verdict(one) for one in judged],
    }
    return pd.DataFrame(columns)


def counts(judged: Sequence[Judged]) -> pd.DataFrame:
    """How many claims came out how: a row a verdict, a column a paper and measure (score, or a distance)."""
    order = [*reversed(claims.WEAKEST_FIRST), "not tested here"]
    columns: dict[tuple[str, str], list[str]] = {}
    for one in judged:
        found = one.verdicts or {"score": order[-1], "kl": order[-1]}
        for metric, outcome in found.items():
            measure = {"score": "score", "kl": "KL, NLL", "nll": "KL, NLL"}.get(metric, "weights and text")
            columns.setdefault((one.claim.paper, measure), []).append(outcome)
    table = pd.DataFrame({key: pd.Series(found).value_counts() for key, found in columns.items()})
    return table.reindex(order).dropna(how="all").fillna(0).astype(int)


def claims_as_markdown(judged: Sequence[Judged]) -> str:
    """:func:`claimed` as a Markdown table."""
    table = claimed(judged)
    rows = [list(table.columns), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def claims_as_text(judged: Sequence[Judged]) -> str:
    """For a terminal: what was tested as a table, the score and a distance side by side; then the rest, and why."""
    lines = [("claim", "published", "score", "", "distance", "", "n")]
    for one in judged:
        cells = {metric == "score": _cells(one, metric) for metric in one.verdicts}
        if cells:
            score, distance = (cells.get(kind, ("", "")) for kind in (True, False))
            n = "".join(_samples(one)).removeprefix("n = ")
            lines.append((one.claim.id, one.claim.told() or "–", *score, *distance, n))
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    text += [
        "",
        "Arm minus baseline with a 95 % interval, in a claim's weakest case; in brackets, where the interval spans zero, the",
        "true difference that so many samples would show. Distances (KL, NLL) are better below zero.",
    ]
    rest = {one.claim.id: one.why for one in judged if not one.verdicts}
    if rest:
        width = max(map(len, rest))
        text += ["", "not tested here:", *(f"  {name.ljust(width)}  {why}" for name, why in rest.items())]
    return "\n".join(text)


def _cells(judged: Judged, metric: str) -> tuple[str, str]:
    row = judged.weakest(metric)
    shown = _difference(row) if metric == "score" else f"{_name(metric)} {_difference(row)}"
    return shown, row["verdict"] + _reach(row)


def _reach(row: pd.Series) -> str:
    """What an inconclusive comparison would have shown, in brackets."""
    if row["verdict"] != "inconclusive" or row["metric"] not in plots.METRICS:
        return ""
    return f" ({_detectable(row)})" if row["se"] else " (every sample ties)"


def differences(comparison: pd.DataFrame) -> pd.DataFrame:
    """A comparison for reading: a row an arm, and for each metric the difference, its interval and what could be missed."""
    columns: dict[tuple[str, str], pd.Series] = {}
    if comparison["baseline"].nunique() > 1:
        baselines = comparison.drop_duplicates("arm").set_index("arm")["baseline"]
        columns["minus", ""] = baselines.map(lambda arm: plots.look(arm).label)
    columns["n", ""] = comparison.groupby("arm", sort=False)["n"].min()
    for metric, rows in comparison.groupby("metric", sort=False):
        name = _unit(str(metric))
        rows = rows.set_index("arm")
        columns[name, "difference [95 %]"] = rows.apply(_difference, axis=1)
        columns[name, "detectable"] = rows.apply(_detectable, axis=1)
    table = pd.DataFrame(columns)
    table.index = pd.Index([plots.look(str(arm)).label for arm in table.index], name=_against(comparison))
    return table


def swept(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """``analyses.sweep`` for reading, one metric: a row an arm, a column a share of entries, means with intervals."""
    rows = table[table["metric"] == metric].copy()
    rows["text"] = rows.apply(_mean, axis=1)
    wide = rows.pivot(index="arm", columns="retain", values="text").fillna("–")
    wide = wide.loc[results.in_order(wide.index, results.ARMS)]
    named = f"{_unit(metric)}, {count(rows['n'])}"
    wide.index = pd.Index([plots.look(arm).label for arm in wide.index], name=named)
    return wide.rename(columns="{:.0%}".format).rename_axis(columns=None)


def lasting(table: pd.DataFrame) -> pd.DataFrame:
    """``analyses.lasting`` for reading: a row a difference and share of entries."""
    columns = {}
    rows = table.assign(
        difference=[f"{plots.look(x).label} minus {plots.look(y).label}" for x, y in zip(table["arm"], table["baseline"])],
        share=table["retain"].map("{:.0%}".format),
    )  # fmt: skip
    order = list(rows["difference"].unique())
    rows = rows.iloc[sorted(range(len(rows)), key=lambda i: order.index(rows["difference"].iloc[i]))]
    for metric, part in rows.groupby("metric", sort=False):
        part = part.set_index(["difference", "share"])
        columns["", "n"] = part["n"]
        columns[_unit(str(metric)), "difference [95 %]"] = part.apply(_difference, axis=1)
        columns[_unit(str(metric)), "detectable"] = part.apply(_detectable, axis=1)
    return pd.DataFrame(columns)


def rows(parts: Mapping[str, pd.DataFrame], missing: str) -> str:
    """A sentence: how many rows of each benchmark are there, or, where there are none, ``missing``."""
    counts = [
        f"{name}: {frame['sample'].nunique()} rows of {frame['task'].nunique()} tasks, prompts of "
        f"{frame['n_tokens'].min():,.0f} to {frame['n_tokens'].max():,.0f} tokens"
        for name, frame in parts.items()
    ]
    return "; ".join(counts) + "." if counts else missing


def by_dataset(frame: pd.DataFrame, metric: str = "score") -> pd.DataFrame:
    """``analyses.by_dataset`` for reading."""
    table = analyses.by_dataset(frame, metric).map(f"{{:.{plots.METRICS[metric].digits}f}}".format)
    return table.rename(columns=lambda arm: plots.look(arm).label).rename_axis(columns=_unit(metric))


def beside(parts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Averages on each benchmark here, and the papers' beside them; a row an arm."""
    ours = {
        f"here, {name} (n = {frame['sample'].nunique()})": results.by_category(frame)["average"].droplevel("retain")
        for name, frame in parts.items()
    }  # fmt: skip
    table = pd.DataFrame(ours)
    table = table.loc[results.in_order(table.index, results.ARMS)].rename_axis("arm")
    return table.join(published_averages(list(table.index)))


def mechanics(frame: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """What the merge did, from the diagnostics: means over samples (and, within a sample, over layers)."""
    names = {f"diag.{name}": label for name, label in MECHANICS.items()}
    there = [name for name in names if name in frame]
    table = (
        frame[frame["arm"].isin(arms)].groupby("arm")[there].mean().reindex(list(arms)).rename(columns=names)
    )
    table.index = pd.Index([plots.look(arm).label for arm in arms], name="arm")
    return table


CONSERVATION = {
    "mass_share": "share: Σ l",
    "tokens_held": "share: tokens held",
    "merges": "merges",
    "composite": "fallback: slot merged in the same step",
    "left_out": "queries left out",
    "no_mass": "no attention",
    "denominator": "vanishing denominator",
    "outside": "weight outside 0 to 1",
    "halves": "0/0",
}


def guards(frame: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """What merging pairs lost, and how often its closed form had no answer: means over samples and layers."""
    names = {f"diag.{name}": label for name, label in CONSERVATION.items() if f"diag.{name}" in frame}
    table = frame[frame["arm"].isin(arms)].groupby("arm")[list(names)].mean()
    table = table.reindex([arm for arm in arms if arm in table.index]).rename(columns=names)
    table.index = pd.Index([plots.look(arm).label for arm in table.index], name="arm")
    return table.dropna(axis=1, how="all")


def merging(table: pd.DataFrame) -> pd.DataFrame:
    """``analyses.merging`` for reading."""
    return pd.DataFrame(
        {
            "difference [95 %]": table.apply(_difference, axis=1),
            "n": table["n"],
            "detectable": table.apply(_detectable, axis=1),
        }
    )


def closer(frame: pd.DataFrame, arm: str, baseline: str, metric: str = "kl") -> str:
    """How much closer to the full cache an arm is than a baseline: in all, and in each category and needle task."""
    table = results.by_category(frame, metric).droplevel("retain")
    change = pd.Series(table.loc[arm] / table.loc[baseline] - 1)
    tasks = frame[frame["arm"].isin((arm, baseline))].groupby(["task", "arm"])[metric].mean().unstack("arm")
    needles = tasks[tasks.index.str.contains("needle")]
    parts = pd.concat([change.drop("average"), needles[arm] / needles[baseline] - 1])
    listed = ", ".join(f"{name} {_percent(share)}" for name, share in parts.astype(float).items())
    worse = ", ".join(f"{name} ({_percent(share)})" for name, share in parts.items() if share > 0)
    pair = f"{_name(metric)} of {plots.look(arm).label} against {plots.look(baseline).label}"
    average = _percent(float(change["average"]))
    return f"{pair}: **{average}** on average ({listed}). Worse {'in ' + worse if worse else 'nowhere'}."


def _percent(share: float) -> str:
    return f"{share:+.0%}".replace("-", "−")


def headroom(frame: pd.DataFrame, low: float = 10) -> str:
    """What the full cache scores, and where it scores so little that compression has nothing to lose."""
    scores = results.by_category(frame, "score").droplevel("retain").loc["full"]
    categories = scores.drop("average")
    weak = [str(name) for name, score in categories.items() if score < low]
    where = (
        f"below {low:g} in {', '.join(weak)}, where there is little to lose"
        if weak
        else f"at least {low:g} everywhere"
    )
    return f"With its full cache the model scores {scores['average']:.1f} of 100 on average, and {where}."


def settings(method: str) -> pd.DataFrame:
    """A method's settings: default, meaning, and whether the paper says so or we chose."""
    table = pd.DataFrame(explain(method)["settings"], dtype=object).set_index("name").rename_axis("setting")
    return table[["default", "meaning", "source"]].map(str)


def published_averages(arms: Sequence[str]) -> pd.DataFrame:
    """The papers' LongBench averages of some arms: a row an arm, a column a model and setting that has at least two."""
    empty = pd.DataFrame({"average": float("nan")}, index=pd.Index(arms, name="arm"))
    return published.beside(empty).drop(columns="here").dropna(how="all")


def published_values() -> pd.DataFrame:
    """AsymKV's value ablation, scores on MuSiQue: a row a rule for the keys' weights, a column a treatment of the values."""
    table = published.load()
    table = table[(table["paper"] == "AsymKV") & (table["benchmark"] == "MuSiQue")]
    wide = table.pivot(index="method", columns="setting", values="value")
    wide = wide.reindex(index=table["method"].unique(), columns=table["setting"].unique())
    return wide.assign(difference=wide["asymmetric V"] - wide["symmetric V"]).rename_axis(
        index="keys weighted by", columns=None
    )


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Every number with the digits that it deserves, as text: scores one, measures three, shares in percent."""
    return pd.DataFrame(
        {column: [_cell(column, x) for x in table[column]] for column in table}, index=table.index
    )


def _cell(column: object, x: object) -> str:
    if isinstance(x, str):
        return x
    if not isinstance(x, int | float) or pd.isna(x):
        return "–" if pd.isna(x) else str(x)  # type: ignore[call-overload]
    name = str(column)
    if name in (*CATEGORIES, *analyses.RULER_KINDS.values(), "average", "score"):
        return f"{x:.1f}"
    if name == "here" or " (" in name:  # beside the papers' averages, which have two digits
        return f"{x:.2f}"
    if name in ("nll", "kl", "agree"):
        return f"{x:.3f}"
    if name.startswith(("retain", "kept_", "share", "below a")):
        return f"{x:.0%}" if name == "retain" else f"{x:.1%}"
    return f"{x:.3g}" if isinstance(x, float) and abs(x) < 1000 else f"{x:,.0f}"


def _missed(row: pd.Series) -> str:
    if row["verdict"] == "no interval":
        return " (a task has one sample)"
    if row["verdict"] != "inconclusive":
        return ""
    if not row["se"]:
        return " (every sample ties)"
    return f" (a true difference below {_detectable(row)} could be missed)"


def _difference(row: pd.Series) -> str:
    form = {"heads": ".0%", "correlation": "+.2f"}.get(row["metric"]) or f"+.{_digits(row)}f"
    diff, low, high = (format(row[name] + 0.0, form).replace("-", "−") for name in ("diff", "low", "high"))
    return diff if pd.isna(row["low"]) else f"{diff} [{low}, {high}]"


def _mean(row: pd.Series) -> str:
    digits = plots.METRICS[row["metric"]].digits
    mean, low, high = (f"{row[name] + 0.0:.{digits}f}".replace("-", "−") for name in ("mean", "low", "high"))
    return mean if pd.isna(row["low"]) else f"{mean} [{low}, {high}]"


def _unit(metric: str) -> str:
    return f"{_name(metric)}, {plots.METRICS[metric].unit}"


def _detectable(row: pd.Series) -> str:
    return "–" if pd.isna(row["detectable"]) or not row["se"] else f"{row['detectable']:.{_digits(row)}f}"


def _digits(row: pd.Series) -> int:
    return plots.METRICS[row["metric"]].digits + 1


def _name(metric: object) -> str:
    names = {"kl": "KL", "nll": "NLL", "heads": "share of heads", "correlation": "ρ ="}
    return names.get(str(metric), str(metric))


def _against(comparison: pd.DataFrame) -> str:
    baselines = comparison["baseline"].unique()
    return f"minus {plots.look(baselines[0]).label}" if len(baselines) == 1 else ""
