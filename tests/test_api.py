"""The public API is listed, and templates use nothing outside of it."""

from __future__ import annotations

from pathlib import Path

from tests import api


def test_the_listed_api_is_up_to_date() -> None:
    assert api.PAGE.read_text() == api.page(), "write it again with: uv run python tests/api.py"


def test_everything_that_templates_import_is_part_of_the_listed_api() -> None:
    templates = Path(api.REPOSITORY, "framework/worldsize/cli/templates").rglob("*.py.j2")
    for text in (path.read_text() for path in templates):
        for line in (line for line in text.splitlines() if line.startswith("from worldsize.")):
            module, _, names = line.removeprefix("from ").partition(" import ")
            known = api.BLOCKS.get(module)
            listed = module in (*api.EVERYTHING, "worldsize.core", "worldsize.__main__")
            assert listed or set(names.strip("()").split(", ")) <= set(known or ()), line
