"""Each promise of docs/security.md names an existing test."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import REPOSITORY

PAGE = REPOSITORY / "docs" / "security.md"
NAMED = sorted(set(re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/.]+)\)", PAGE.read_text())))


@pytest.mark.parametrize(("name", "file"), NAMED, ids=[name for name, _ in NAMED])
def test_a_test_that_the_page_names_exists(name: str, file: str) -> None:
    assert f"\ndef {name}(" in (REPOSITORY / file).read_text()


def test_every_promise_names_a_test() -> None:
    tables = re.findall(r"^\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 20
    assert [row for row in rows if "[`test_" not in row] == []
