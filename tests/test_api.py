"""The public API changes only on purpose, and with a line in the changelog."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests import api

CHANGELOG = (api.REPOSITORY / "CHANGELOG.md").read_text()


def test_the_listed_api_is_up_to_date_and_in_the_changelog() -> None:
    assert api.PAGE.read_text() == api.page(), "write it again with: uv run python tests/api.py"
    newest = CHANGELOG.split("\n## ")[1]
    digest = api.digest(api.listing())
    assert f"API `{digest}`" in newest, f"say in CHANGELOG.md what changed for plugins: - API `{digest}`: ..."


def test_a_changed_name_or_signature_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = api.digest(api.listing())
    core = importlib.import_module("worldsize.core")
    monkeypatch.setattr(core.Recipe, "remarks", lambda self, model, more: [])
    changed = api.digest(api.listing())
    monkeypatch.delattr(core.Recipe, "remarks")
    assert len({before, changed, api.digest(api.listing())}) == 3


def test_everything_that_templates_import_is_part_of_the_listed_api() -> None:
    templates = Path(api.REPOSITORY, "framework/worldsize/cli/templates").rglob("*.py.j2")
    for text in (path.read_text() for path in templates):
        for line in (line for line in text.splitlines() if line.startswith("from worldsize.")):
            module, _, names = line.removeprefix("from ").partition(" import ")
            known = api.BLOCKS.get(module)
            listed = module in (*api.EVERYTHING, "worldsize.core", "worldsize.__main__")
            assert listed or set(names.strip("()").split(", ")) <= set(known or ()), line
