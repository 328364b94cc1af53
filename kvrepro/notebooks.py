"""Executing the notebooks, and the few lines that all of them share.

    kvrepro notebooks --profile quick      every notebook, through papermill, into results/quick/notebooks

A notebook's parameters are ``profile``, ``model``, ``device``, ``retain`` and ``figures`` (a folder for its figures;
empty: it saves none).  It computes nothing itself: it runs a profile, asks the stored results, draws.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pandas as pd

from . import analyses, plots, profiles, results, runner, studies
from .errors import UserError
from .progress import progress

ROOT = Path(__file__).parents[1]  # the checkout: the package is installed editable
FOLDER = ROOT / "notebooks"


def profile_here(default: str = "quick") -> str:
    """The profile a notebook runs when nobody gives it one: ``KVREPRO_PROFILE``, else ``default``."""
    return os.environ.get("KVREPRO_PROFILE", default)


def records(
    profile: str, model: str, device: str, retain: float | None = None, study: str | None = None
) -> pd.DataFrame:
    """Results of a profile, or of a study at its size, at one retention.

    Taken from ``results/`` where a run has begun there (what is missing is measured first), else from the records that
    the repository carries in ``data/results/``, else measured now.
    """
    name = runner.folder(profile, model, device, study)
    out = ROOT / "results" / name
    carried = ROOT / "data" / "results" / name
    if not out.exists() and results.holds(carried):
        frame = results.load(carried)
        if retain is None or retain in set(frame["retain"]):
            return analyses.at(frame, retain)
    chosen = profiles.load(profile) if study is None else studies.of(study, profile)
    runner.run(chosen, model, out=out, device=device, retain=None if retain is None else [retain])
    return analyses.at(results.load(out), retain)


def stored(profile: str, models: Sequence[str], device: str, study: str) -> dict[str, pd.DataFrame]:
    """A study's records of other models, where there are some: nothing is measured."""
    found = {}
    for model in models:
        name = runner.folder(profile, model, device, study)
        for folder in (ROOT / "results" / name, ROOT / "data" / "results" / name):
            if results.holds(folder):
                found[model] = analyses.at(results.load(folder))
                break
    return found


def show(figure: plots.Figure, name: str, folder: str) -> plots.Figure:
    """Save a figure as PNG, SVG and CSV where ``folder`` says so, and hand it on to be shown."""
    if folder:
        plots.save(figure, ROOT / folder, name)
    return figure


def execute(
    out: str | Path,
    *,
    profile: str,
    model: str,
    device: str,
    retain: float | None,
    figures: str,
    only: str | None,
) -> list[Path]:
    """Execute every notebook with the given parameters into ``out``.

    Raises
    ------
    UserError
        No notebook matches, or one failed (its name and last line; the executed file shows where).
    """
    profiles.load(profile)  # an unknown profile is said before anything is executed
    import papermill
    from traitlets.config import Config

    local = Config(KernelManager={"transport": "ipc"})  # over TCP each kernel warns that it is not encrypted

    sources = [path for path in sorted(FOLDER.glob("*.ipynb")) if not only or only in path.name]
    if not sources:
        raise UserError(
            f"no notebook matches {only!r}; there are {', '.join(p.name for p in sorted(FOLDER.glob('*.ipynb')))}"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    parameters = {"profile": profile, "model": model, "device": device, "retain": retain, "figures": figures}
    written = []
    for source in progress(sources, "notebooks"):
        target = out / source.name
        try:
            papermill.execute_notebook(
                str(source),
                str(target),
                parameters,
                cwd=str(FOLDER),
                progress_bar=False,
                log_output=False,
                config=local,
            )
        except papermill.PapermillExecutionError as error:
            raise UserError(
                f"{source.name} failed with {error.ename}: {error.evalue}; see {target}"
            ) from error
        written.append(target)
    return written


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy fit for git: outputs kept, but no run metadata, injected parameters, timings or machine paths."""
    copy = nbformat.from_dict(notebook)
    copy.cells = [cell for cell in copy.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    copy.metadata = {
        key: copy.metadata[key] for key in ("kernelspec", "language_info") if key in copy.metadata
    }
    for cell in copy.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("metadata", {}).clear()
    return copy
