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
SWEEPS = {"one-shot methods": "sweep", "chunked methods": "sweep-chunked"}  # studies; their samples differ


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
    return analyses.at(_measured(profile, model, device, retain, study), retain)


def swept(profile: str, model: str, device: str, *, measure: bool = True) -> dict[str, pd.DataFrame]:
    """Records of the sweeps at every retention, by what their methods have in common.

    The one-shot methods' are taken as :func:`records` does, unless ``measure`` is off; the others', which take a prefill
    for each arm and share, only where they are stored.
    """
    found = {name: _stored(runner.folder(profile, model, device, study)) for name, study in SWEEPS.items()}
    if measure:
        found["one-shot methods"] = _measured(profile, model, device, None, SWEEPS["one-shot methods"])
    return {name: frame for name, frame in found.items() if frame is not None}


def rows(
    profile: str, model: str, device: str, retain: float | None = None, data: str = ""
) -> dict[str, pd.DataFrame]:
    """Records of a benchmark's rows, each benchmark apart; none where nothing is stored and ``data`` names no rows.

    Taken from where they are stored.  With ``data`` (a folder of rows, or ``hub``) what is missing of a run is measured,
    unless the repository carries one.
    """
    name = runner.folder(profile, model, device)
    if data and not results.holds(ROOT / "data" / "results" / name):
        share = None if retain is None else [retain]
        runner.run(profile, model, out=ROOT / "results" / name, device=device, retain=share, data=data)
    frame = _stored(name)
    return {} if frame is None else analyses.benchmarks(analyses.at(frame, retain))


def stored(profile: str, models: Sequence[str], device: str, study: str) -> dict[str, pd.DataFrame]:
    """A study's records of other models, where there are some: nothing is measured."""
    found = {model: _stored(runner.folder(profile, model, device, study)) for model in models}
    return {model: analyses.at(frame) for model, frame in found.items() if frame is not None}


def _measured(profile: str, model: str, device: str, retain: float | None, study: str | None) -> pd.DataFrame:
    name = runner.folder(profile, model, device, study)
    out = ROOT / "results" / name
    carried = ROOT / "data" / "results" / name
    if not out.exists() and results.holds(carried):
        frame = results.load(carried)
        if retain is None or retain in set(frame["retain"]):
            return frame
    chosen = profiles.load(profile) if study is None else studies.of(study, profile)
    runner.run(chosen, model, out=out, device=device, retain=None if retain is None else [retain])
    return results.load(out)


def _stored(name: str) -> pd.DataFrame | None:
    """What a results folder of this name holds, one's own before the carried one."""
    for folder in (ROOT / "results" / name, ROOT / "data" / "results" / name):
        if results.holds(folder):
            return results.load(folder)
    return None


def show(figure: plots.Figure, name: str, folder: str) -> plots.Figure:
    """Save a figure as PNG, SVG and CSV where ``folder`` says so, and hand it on to be shown."""
    if folder:
        plots.save(figure, ROOT / folder, name)
    return figure


def framed(page: str, name: str, folder: str) -> str:
    """An HTML page in a frame of its own, to be shown; saved as NAME.html, and linked, where ``folder`` says so."""
    link = ""
    if folder:
        path = ROOT / folder / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write_atomic(path, page.encode())
        link = f'<p><a href="{os.path.relpath(path, FOLDER)}">{folder}/{name}.html</a></p>'
    source = page.replace("&", "&amp;").replace("'", "&#39;")
    style = "width: 100%; height: 40rem; border: 1px solid #888"
    return f"<div><iframe srcdoc='{source}' style='{style}'></iframe></div>{link}"


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
    from nbclient.exceptions import DeadKernelError
    from traitlets.config import Config

    local = Config(
        KernelManager={"transport": "ipc"},  # over TCP each kernel warns that it is not encrypted
        NotebookClient={"shutdown_kernel": "immediate"},  # one that is asked first prints a traceback
    )

    sources = [path for path in sorted(FOLDER.glob("*.ipynb")) if not only or only in path.name]
    if not sources:
        raise UserError(
            f"no notebook matches {only!r}; there are {', '.join(p.name for p in sorted(FOLDER.glob('*.ipynb')))}"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    parameters = {"profile": profile, "model": model, "device": device, "retain": retain, "figures": figures}
    written: list[Path] = []
    for source in progress(sources, "notebooks"):
        target = out / source.name
        draft = out / f".{source.name}"  # one that is stopped leaves an earlier one as it was
        kept = "what it measured is kept, run the same command again to go on"
        try:
            papermill.execute_notebook(
                str(source),
                str(draft),
                parameters,
                cwd=str(FOLDER),
                progress_bar=False,
                log_output=False,
                config=local,
            )
        except papermill.PapermillExecutionError as error:
            draft.replace(target)
            first = next(iter(str(error.evalue).splitlines()), "")
            raise UserError(f"{source.name} failed with {error.ename}: {first}; see {target}") from error
        except DeadKernelError as error:
            raise UserError(
                f"the kernel of {source.name} died, most likely because memory ran out; {kept}, with other programs closed"
            ) from error
        except KeyboardInterrupt:
            raise UserError(
                f"stopped in {source.name}; {len(written)} of {len(sources)} notebooks are finished in {out}; {kept}"
            ) from None
        else:
            written.append(draft.replace(target))
        finally:
            draft.unlink(missing_ok=True)
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
