"""Writes a recipe of a test's own into the project in which it trains."""

from __future__ import annotations

from pathlib import Path


def write_recipe(project: Path, name: str, code: str, **options: str) -> Path:
    """Write ``recipes/<name>`` below ``project``, and return its folder.

    Args:
        project: Folder in which ``train`` trains.
        name: Name of the recipe.
        code: Text of its ``recipe.py``.
        options: Texts of its configurations by the name that chooses them, ``recipe=<name>``.
    """
    folder = project / "recipes" / name
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "recipe.py").write_text(code)
    for chosen, text in options.items():
        (folder / "conf" / "recipe" / f"{chosen}.yaml").write_text(text)
    return folder
