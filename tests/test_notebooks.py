"""The committed notebooks as files: parameters, order, links, and nothing in them that belongs to one machine or run.

Whether they run is nbval's business (``make test``).
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kvrepro import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
PARAMETERS = {"profile", "model", "device", "retain", "figures"}
MORE = {  # parameters that a reader gives
    "15_longbench": {"data"},
    "16_ruler_and_v2": {"data"},
    "17_your_own_text": {"text_file", "question", "methods", "max_new_tokens"},
}
FIGURES = {
    "entries_map", "sag", "adjacent_similarity", "cardinality", "main_scores", "categories_kl", "categories_score",
    "plugin", "gate_ablation", "bias_ablation", "deviations", "own_eviction", "models_kl", "positions",
    "selectors", "selectors_kl", "operators", "spectra", "ranks", "similarity_spectrum", "similarity_spectrum_gemma",
    "angle_relation", "merged_alphas", "rule_weights", "weights_ablation", "value_ablation", "slimmer_bias",
    "sweep_offline", "sweep_offline_lasting", "sweep_longbench", "sweep_longbench_lasting", "longbench_e_kl", "longbench_kl",
    "longbench_own", "longbench_models_kl", "ruler_kl",
}  # fmt: skip


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook: nbformat.NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def test_they_are_numbered_without_a_gap():
    assert [path.name[:3] for path in PATHS] == [f"{number:02}_" for number in range(1, len(PATHS) + 1)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_first_code_cell_holds_the_parameters_that_execute_passes(path):
    notebook = read(path)
    first, *others = code(notebook)
    assert first.metadata.tags == ["parameters"]
    assert not any("parameters" in cell.metadata.get("tags", []) for cell in others)
    assigned = {
        target.id
        for node in ast.walk(ast.parse(first.source))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert assigned == PARAMETERS | MORE.get(path.stem, set())
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_begins_with_its_title_links_and_running_time(path):
    notebook = read(path)
    opening = notebook.cells[0].source
    assert re.match(rf"# {int(path.stem[:2])}\. ", opening)
    assert "Running time" in opening
    links = re.findall(r"\]\(([^)#]+)\)", prose(notebook))
    for link in links:
        assert link.startswith("https://") or (path.parent / link).exists(), link


def test_neighbours_link_to_each_other_at_both_ends():
    for before, after in pairwise(PATHS):
        for end in (0, -1):
            assert f"→]({after.name})" in read(before).cells[end].source
            assert f"[← {int(before.stem[:2])}. " in read(after).cells[end].source
            assert f"]({before.name})" in read(after).cells[end].source


def test_every_figure_is_drawn_once_under_its_own_name():
    source = "\n".join(cell.source for path in PATHS for cell in code(read(path)))
    names = re.findall(r'nb\.show\(.*, "(\w+)", figures\)', source)
    assert len(names) == source.count("nb.show(")
    assert sorted(names) == sorted(FIGURES)


def test_outputs_are_checked_only_where_neither_profile_nor_machine_matters():
    checked = [cell for path in PATHS for cell in code(read(path)) if "# NBVAL_CHECK_OUTPUT" in cell.source]
    assert len(checked) == 6  # the settings of four methods, and what is published beside both ablations
    for cell in checked:
        names = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        assert names <= {"readings", "arms"}
        assert cell.outputs, "nbval compares with what is stored"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_committed_is_clean_and_names_no_machine(path):
    notebook = read(path)
    assert notebooks.cleaned(notebook) == notebook
    text = nbformat.writes(notebook)
    for sign in (
        "/home/",
        "/root/",
        "/tmp/",
        "/Users/",
        "site-packages",
        "papermill",
        "iopub",
        "stderr",
    ):
        assert sign not in text, sign
    assert not any(output.output_type == "error" for cell in code(notebook) for output in cell.outputs)


def test_cleaning_keeps_outputs_and_tags_and_nothing_of_the_run():
    stamps = {"iopub.execute_input": "2020-01-01T00:00:00Z"}
    run = {"start_time": "2020-01-01T00:00:00", "duration": 1.5, "input_path": "/home/somebody/01.ipynb"}
    executed = new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "language_info": {"name": "python"},
            "papermill": run,
        },
        cells=[
            new_code_cell(
                "a = 1", metadata={"tags": ["parameters"], "papermill": run, "execution": stamps}
            ),
            new_code_cell("a = 2", metadata={"tags": ["injected-parameters"]}),
            new_markdown_cell("text", metadata={"papermill": run}),
            new_code_cell(
                "print(a)",
                metadata={"papermill": run},
                execution_count=3,
                outputs=[
                    new_output("stream", name="stdout", text="2"),
                    new_output("stream", name="stderr", text="/home/somebody/lib.py:1: a warning"),
                    new_output("display_data", data={"text/plain": "x"}, metadata={"needs": run}),
                ],
            ),
        ],
    )  # fmt: skip
    before = nbformat.writes(executed)
    clean = notebooks.cleaned(executed)

    assert nbformat.writes(executed) == before  # a copy: the executed one is left as it was
    assert [cell.source for cell in clean.cells] == ["a = 1", "text", "print(a)"]
    assert clean.cells[0].metadata == {"tags": ["parameters"]}
    assert set(clean.metadata) == {"kernelspec", "language_info"}
    assert [output.get("text", output.get("data")) for output in clean.cells[2].outputs] == [
        "2",
        {"text/plain": "x"},
    ]
    text = nbformat.writes(clean)
    for sign in ("somebody", "2020", "duration", "needs"):
        assert sign not in text
    nbformat.validate(clean)


def test_no_notebook_of_that_name_is_said(tmp_path):
    from kvrepro.errors import UserError

    with pytest.raises(UserError, match="no notebook matches '99'; there are 01_selkv"):
        notebooks.execute(
            tmp_path, profile="smoke", model="smollm2-135m", device="cpu", retain=None, figures="", only="99"
        )


def test_the_profile_may_come_from_outside(monkeypatch):
    monkeypatch.setenv("KVREPRO_PROFILE", "smoke")
    assert notebooks.profile_here() == "smoke"
    monkeypatch.delenv("KVREPRO_PROFILE")
    assert notebooks.profile_here() == "quick"
