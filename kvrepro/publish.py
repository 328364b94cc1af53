"""Take a finished run as the one the repository shows: notebooks with outputs, tables, and the README's numbers.

    python -m kvrepro.publish results/quick

Writes notebooks/*.ipynb (executed, cleaned), data/results/PROFILE/*.csv and the marked block of README.md, so that no
number in prose is typed by hand; a test compares the block with the tables.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import pandas as pd

from . import analyses, notebooks, plots, results

ROOT = notebooks.ROOT
BEGIN, END = "<!-- results: written by python -m kvrepro.publish -->", "<!-- end of results -->"


def publish(folder: str | Path) -> list[Path]:
    """Copy what a run produced to where it is committed; returns the files written."""
    folder = Path(folder)
    run = json.loads((folder / results.RUN).read_text())
    frame = analyses.at(results.load(folder))
    run["dtype"] = str(frame["dtype"].iloc[0])
    target = ROOT / "data" / "results" / run["profile"]
    target.mkdir(parents=True, exist_ok=True)
    tables = {
        "main_table": results.main_table(frame).reset_index(),
        "comparisons": pd.concat(
            [analyses.compare(frame, name).assign(comparison=name) for name in analyses.answered(frame)]
        ),
        "summary": results.summary(frame),
    }
    written = []
    for name, table in tables.items():
        written.append(target / f"{name}.csv")
        table.to_csv(written[-1], index=False, float_format="%.6g")
    written.append(target / results.RUN)
    written[-1].write_text(json.dumps(run, indent=2) + "\n")
    for path in sorted((folder / "notebooks").glob("*.ipynb")):
        written.append(notebooks.FOLDER / path.name)
        nbformat.write(notebooks.cleaned(nbformat.read(path, as_version=4)), written[-1])
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(before + BEGIN + "\n" + block(target) + END + after)
    return [*written, readme]


def block(tables: Path) -> str:
    """The README's results in Markdown, from the committed tables."""
    run = json.loads((tables / results.RUN).read_text())
    main = pd.read_csv(tables / "main_table.csv")
    main = main[main["arm"].isin(analyses.MAIN)]
    lines = [
        f"Profile `{run['profile']}`, {run['model']}, {run['dtype']}, {int(main['n'].max())} samples in six "
        f"categories, a quarter of the entries kept:",
        "",
        "| method | score | KL from full | NLL of gold | top-1 agreement | entries | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in main.to_dict("records"):
        lines.append(
            f"| {plots.look(row['arm']).label} | {row['average']:.1f} | {row['kl']:.3f} | {row['nll']:.3f} "
            f"| {row['agree']:.3f} | {row['kept_entries']:.0%} | {row['kept_bytes']:.1%} |"
        )
    lines += [
        "",
        "Paired differences in KL with 95 % bootstrap intervals (below 0: closer to the full cache; in brackets at the end the",
        "true difference that so many samples show with 80 % power):",
        "",
    ]
    found = pd.read_csv(tables / "comparisons.csv")
    found = found[found["metric"] == "kl"].drop_duplicates(["arm", "baseline"])
    for row in found.to_dict("records"):
        verdict = "closer" if row["high"] < 0 else "farther" if row["low"] > 0 else "no difference seen"
        lines.append(
            f"- {plots.look(row['arm']).label} against {plots.look(row['baseline']).label}: {_signed(row['diff'])} "
            f"[{_signed(row['low'])}, {_signed(row['high'])}], n = {row['n']}: {verdict} ({row['detectable']:.3f})"
        )
    return "\n".join(lines) + "\n"


def _signed(number: float) -> str:
    return f"{round(number, 3) + 0.0:+.3f}"  # + 0.0: no negative zero


if __name__ == "__main__":
    for path in publish(sys.argv[1]):
        print(path.relative_to(ROOT))
