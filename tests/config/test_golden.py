"""Changed defaults show as a diff of golden files."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GOLDEN = runpy.run_path(str(Path(__file__).parent / "golden.py"))


@pytest.mark.parametrize("name", GOLDEN["COMBINATIONS"])
def test_a_resolved_configuration_is_the_reviewed_one(name: str) -> None:
    actual = GOLDEN["resolved"](GOLDEN["COMBINATIONS"][name])
    expected = (GOLDEN["FOLDER"] / f"{name}.yaml").read_text()
    assert actual == expected, "write the golden files again with: uv run python tests/config/golden.py"
