"""The notebooks of examples/notebooks run from the first cell to the last, and are committed without outputs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import REPOSITORY
from tests.support.runs import environment

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
LINE = """
import torch, worldsize as ws

class Line(ws.Recipe):
    def __init__(self, make_optimizer): self.make_optimizer = make_optimizer
    def model(self): return torch.nn.Linear(1, 1)
    def optimizer(self, model): return self.make_optimizer(model.parameters())
    def data(self, split): return torch.utils.data.TensorDataset(torch.ones(8, 1))
    def loss(self, model, batch): return 0 * model(batch[0]).mean() + 0.5
    def evaluate(self, model, batch): return {"error": (len(batch[0]), 4 * len(batch[0]))}
"""
TRAIN = "ws.train(recipe=Line, steps=4, batch_size=4, lr=0.1, evaluate_every=2, logger='none');"
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_a_notebook_is_committed_without_outputs(notebook: Path) -> None:
    code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@each_notebook
def test_a_notebook_imports_only_what_its_extra_installs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse("".join(cell["source"])))]
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in modules} - {*sys.stdlib_module_names}
    assert packages <= {"worldsize", "recipes", "torch", "pandas", "matplotlib"}


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_recipe_of_a_cell_shows_its_steps_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(IPYTHONDIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    cells = [{"cell_type": "code", "metadata": {}, "source": text, "outputs": []} for text in (LINE, TRAIN)]
    notebook = nbformat.from_dict({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4})  # type: ignore[no-untyped-call]
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[1].outputs
    assert {output.output_type for output in outputs} == {"stream"}
    printed = "".join(output.text for output in outputs)
    for shown in ("step 4/4  loss 0.5000", "step 2  test: error 0.2500", "test error  0.2500", "steps  ", "state  "):
        assert shown in printed
    assert printed.splitlines()[-1].split(maxsplit=1)[0] == "run"


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@each_notebook
def test_a_notebook_runs_from_the_first_cell_to_the_last(notebook: Path, tmp_path: Path) -> None:
    copy = tmp_path / notebook.name
    copy.write_bytes(notebook.read_bytes())
    done = subprocess.run(
        [Path(sys.executable).with_name("jupyter-execute"), "--inplace", copy],
        cwd=tmp_path,
        env=environment(JUPYTER_RUNTIME_DIR=str(tmp_path / "jupyter"), IPYTHONDIR=str(tmp_path / "ipython")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    code = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(text for output in outputs for text in output.get("text", []))
    assert "step 40/40  loss" in printed
    assert "\x1b" not in printed  # each state of a progress bar would be kept
