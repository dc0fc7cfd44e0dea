"""Pytest plugin that makes ``plugins.NAME`` and ``recipes.NAME`` importable in tests.

    [tool.pytest.ini_options]
    addopts = "-p worldsize.testing.importing"

Plugins and recipes are found in the project, in the folders in ``WORLDSIZE_PLUGINS``, and in worldsize's installation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from worldsize.config.search_path import list_search_roots, make_importable

if TYPE_CHECKING:
    import pytest


def import_plugins(project: Path | None = None) -> None:
    """Append the folders that may contain ``plugins/`` and ``recipes/`` to the import path.

    Args:
        project: Folder of the project; by default, the working directory.
    """
    own = [] if project is None else [project.resolve()]
    make_importable([*own, *list_search_roots()])


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Make plugins and recipes importable before pytest imports the first ``conftest.py``."""
    import_plugins(early_config.rootpath)


def pytest_configure(config: pytest.Config) -> None:
    """Make plugins and recipes importable if a conftest lists this plugin in ``pytest_plugins``."""
    import_plugins(config.rootpath)
