"""The notebooks of examples/notebooks run from the first cell to the last, and are committed without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY
from tests.support.runs import environment

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_a_notebook_is_committed_without_outputs(notebook: Path) -> None:
    code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


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
