"""Take finished runs as those the repository shows: records, tables, notebooks with outputs, and the README's numbers.

    python -m kvrepro.publish results/quick results/quick-slimmer ...

Writes data/results/FOLDER/ (records without answers, tables), notebooks/*.ipynb (executed, cleaned) where a folder holds
them, and the marked blocks of README.md, so that no number in prose is typed by hand; a test compares the blocks with what
is carried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from . import analyses, claims, models, notebooks, plots, profiles, results, tasks
from .measure import asymmetry, readings

ROOT = notebooks.ROOT
TABLES = ROOT / "data" / "results"
BEGIN, END = "<!-- results: written by python -m kvrepro.publish -->", "<!-- end of results -->"
CLAIMS_BEGIN, CLAIMS_END = "<!-- claims: written by python -m kvrepro.publish -->", "<!-- end of claims -->"

# What the README tells of the studies: (study, comparison, arm).
HEADLINES = (
    ("selectors", "selectors", "bifocal"),
    ("selectors", "operators", "selkv/on-bifocal"),
    ("slimmer", "weights_ablation", "kvslimmer/diagonal"),
    ("slimmer", "weights_ablation", "kvslimmer/mass"),
    ("slimmer", "weights_ablation", "kvslimmer/drop-lighter"),
    ("slimmer", "slimmer_bias", "kvslimmer/clamped"),
    ("slimmer", "slimmer_bias", "kvslimmer/ratio"),
    ("released", "gradient", "kvslimmer"),
    ("released", "printed_released", "kvslimmer-released"),
    ("released", "deviations", "kvslimmer-released/disjoint-pairs"),
    ("positions", "positions", "streaming-llm/reindexed"),
    ("positions", "positions", "selkv/reposition"),
)


def publish(folders: Sequence[str | Path]) -> list[Path]:
    """Copy what runs produced to where it is committed; returns the files written."""
    written = []
    for folder in map(Path, folders):
        written += _tables(folder, TABLES / folder.name)
        for path in sorted((folder / "notebooks").glob("*.ipynb")):
            written.append(notebooks.FOLDER / path.name)
            nbformat.write(notebooks.cleaned(nbformat.read(path, as_version=4)), written[-1])
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for begin, content, end in (
        (BEGIN, block(TABLES), END),
        (CLAIMS_BEGIN, claims_block(TABLES), CLAIMS_END),
    ):
        before, after = text.split(begin)[0], text.split(end)[1]
        text = before + begin + "\n" + content + end + after
    readme.write_text(text, encoding="utf-8")
    return [*written, readme]


def _tables(folder: Path, target: Path) -> list[Path]:
    target.mkdir(parents=True, exist_ok=True)
    frame = analyses.at(results.load(folder))
    run = json.loads((folder / results.RUN).read_text(encoding="utf-8")) | {
        "dtype": str(frame["dtype"].iloc[0])
    }
    parts = analyses.benchmarks(frame)
    compared = {
        benchmark: [analyses.compare(part, name).assign(comparison=name) for name in analyses.answered(part)]
        for benchmark, part in parts.items()
    }
    tables = {
        "main_table": _apart({name: results.main_table(part).reset_index() for name, part in parts.items()}),
        "comparisons": _apart({name: pd.concat(found) for name, found in compared.items() if found}),
        "summary": results.summary(frame),
    }
    written = [results.carry(folder, target)]
    if _is_offline(run["profile"]):  # the model's own, whatever the study
        found = asymmetry.measure(*models.load(run["model"]), run["context"])
        written.append(asymmetry.write(found.parts(), target))
    for name, table in tables.items():
        written.append(target / f"{name}.csv")
        table.to_csv(written[-1], index=False, float_format="%.6g")
    written.append(target / results.RUN)
    written[-1].write_text(json.dumps(run, indent=2) + "\n")
    return written


def _is_offline(profile: str) -> bool:
    """Whether this is a profile, not a study of one, and of no benchmark: what spectra are shown of."""
    return profile in profiles.available() and set(profiles.load(profile).tasks) <= set(tasks.available())


def _apart(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """One table of several benchmarks', with a column that says which; of a single one as it is."""
    if len(tables) > 1:
        tables = {name: table.assign(benchmark=name) for name, table in tables.items()}
    return pd.concat(tables.values()) if tables else pd.DataFrame()


def block(tables: Path) -> str:
    """The README's results in Markdown, from the committed tables."""
    run = json.loads((tables / "quick" / results.RUN).read_text(encoding="utf-8"))
    main = pd.read_csv(tables / "quick" / "main_table.csv")
    lines = [
        f"Profile `{run['profile']}`, {run['model']}, {run['dtype']}, {int(main['n'].max())} samples in six "
        f"categories, a quarter of the entries kept:",
        "",
        *_table(main[main["arm"].isin(analyses.MAIN)]),
        "",
        "Paired differences in KL with 95 % bootstrap intervals (below 0: closer to the full cache; in brackets at the end the",
        "true difference that so many samples show with 80 % power):",
        "",
    ]
    found = pd.read_csv(tables / "quick" / "comparisons.csv")
    found = found[found["metric"] == "kl"].drop_duplicates(["arm", "baseline"])
    lines += [_difference(row) for row in found.to_dict("records")]
    every = tables / "quick-methods"
    if every.exists():
        table = pd.read_csv(every / "main_table.csv")
        context = json.loads((every / results.RUN).read_text(encoding="utf-8"))["context"]
        told = [line for headline in HEADLINES for line in _headline(tables, *headline)]
        sizes = f"samples of at most {context:,} tokens"
        lines += [
            "", f"Every method, {int(table['n'].max())} {sizes} (study `methods`):", "", *_table(table),
            "", "KL from each model's own full cache:", "", *_models(tables),
            "", f"From the studies, on {sizes}:", "", *told,
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def claims_block(tables: Path) -> str:
    """The README's claims in Markdown, judged by the committed records."""
    return readings.claims_as_markdown(claims.judge_all(tables))


def _table(main: pd.DataFrame) -> list[str]:
    return [
        "| method | score | KL from full | NLL of gold | top-1 agreement | entries | bytes |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {plots.look(row['arm']).label} | {row['average']:.1f} | {row['kl']:.3f} | {row['nll']:.3f} "
            f"| {row['agree']:.3f} | {row['kept_entries']:.0%} | {row['kept_bytes']:.1%} |"
            for row in main.to_dict("records")
        ),
    ]


def _models(tables: Path) -> list[str]:
    """The study ``methods`` on every model it was run on: a row an arm, a column a model."""
    columns = {}
    for folder in sorted(tables.glob("quick-methods*"), key=lambda path: (len(path.name), path.name)):
        model = json.loads((folder / results.RUN).read_text(encoding="utf-8"))["model"]
        table = pd.read_csv(folder / "main_table.csv").set_index("arm")
        columns[f"{model} (n = {int(table['n'].max())})"] = table["kl"]
    wide = pd.DataFrame(columns).drop(index="full")
    wide = wide.loc[results.in_order(wide.index, results.ARMS)]
    head = ["| method | " + " | ".join(wide.columns) + " |", "|---" * (len(wide.columns) + 1) + "|"]
    return head + [
        f"| {plots.look(str(arm)).label} | " + " | ".join(f"{kl:.3f}" for kl in row) + " |"
        for arm, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]


def _headline(tables: Path, study: str, comparison: str, arm: str) -> list[str]:
    path = tables / f"quick-{study}" / "comparisons.csv"
    if not path.exists():
        return []
    found = pd.read_csv(path)
    found = found[(found["comparison"] == comparison) & (found["arm"] == arm) & (found["metric"] == "kl")]
    return [_difference(row) for row in found.to_dict("records")]


def _difference(row: dict[Any, Any]) -> str:
    verdict = "closer" if row["high"] < 0 else "farther" if row["low"] > 0 else "no difference seen"
    return (
        f"- {plots.look(str(row['arm'])).label} against {plots.look(str(row['baseline'])).label}: {_signed(row['diff'])} "
        f"[{_signed(row['low'])}, {_signed(row['high'])}], n = {row['n']}: {verdict} ({row['detectable']:.4f})"
    )


def _signed(number: float) -> str:
    return f"{round(number, 4) + 0.0:+.4f}"  # + 0.0: no negative zero


if __name__ == "__main__":
    for path in publish(sys.argv[1:]):
        print(path.relative_to(ROOT))
