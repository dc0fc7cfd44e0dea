"""Writes recipes into a test's project."""

from __future__ import annotations

from pathlib import Path

HELD = """\
import time
from pathlib import Path

from recipes.digits.recipe import Digits


class Held(Digits):
    def loss_at(self, model, batch, step):
        if Path("held").exists():
            time.sleep(0.25 if step < 40 else 5)  # beyond any deadline of the test
        return super().loss(model, batch)
"""


def write_held(project: Path) -> Path:
    """Write ``recipe=held``: digits with slow steps while a file exists. Create that file and return its path."""
    target = "defaults: [digits, _self_]\nrecipe: {_target_: recipes.held.recipe.Held}\n"
    write_recipe(project, "held", HELD, held=f"# @package _global_\n{target}")
    (project / "held").touch()
    return project / "held"


def write_recipe(project: Path, name: str, code: str, **options: str) -> Path:
    """Write ``recipes/<name>`` below ``project``, and return its folder.

    Args:
        project: Working directory of ``train``.
        name: Name of the recipe.
        code: Text of its ``recipe.py``.
        options: Texts of its configurations (YAML), by option name, as in ``recipe=<option>``.
    """
    folder = project / "recipes" / name
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "recipe.py").write_text(code)
    for chosen, text in options.items():
        (folder / "conf" / "recipe" / f"{chosen}.yaml").write_text(text)
    return folder
