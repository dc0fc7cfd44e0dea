"""Makes ``plugins.NAME`` and ``recipes.NAME`` importable in tests, as a run imports them; a plugin of pytest.

    [tool.pytest.ini_options]
    addopts = "-p worldsize.testing.importing"

It finds those of the project, those of the folders in ``WORLDSIZE_PLUGINS``, and worldsize's own, wherever it is
installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.config.search_path import make_importable, roots

if TYPE_CHECKING:
    import pytest


def import_plugins(project: Path | None = None) -> None:
    """Put the folders that may hold ``plugins/`` and ``recipes/`` on the import path, behind what is there.

    Args:
        project: Folder of the project; None: the working directory.
    """
    own = [] if project is None else [project.resolve()]
    make_importable([*own, *roots()])


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Make plugins and recipes importable before pytest imports the first ``conftest.py``."""
    import_plugins(early_config.rootpath)


def pytest_configure(config: pytest.Config) -> None:
    """Make plugins and recipes importable where a ``conftest.py`` names this module in ``pytest_plugins``."""
    import_plugins(config.rootpath)
