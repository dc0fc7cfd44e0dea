"""Changed defaults appear as a diff of golden files."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from worldsize.config.schema import CheckpointConfig

GOLDEN = runpy.run_path(str(Path(__file__).parent / "golden.py"))


@pytest.mark.parametrize("name", GOLDEN["COMBINATIONS"])
def test_a_resolved_configuration_is_the_reviewed_one(name: str) -> None:
    actual = GOLDEN["resolved"](GOLDEN["COMBINATIONS"][name])
    expected = (GOLDEN["FOLDER"] / f"{name}.yaml").read_text()
    assert actual == expected, "write the golden files again with: uv run python tests/config/golden.py"


def test_the_usual_checkpoints_are_those_of_the_section() -> None:
    written: Any = OmegaConf.to_container(OmegaConf.load(GOLDEN["REPOSITORY"] / "conf" / "checkpoint" / "default.yaml"))
    written.pop("keep")
    defaults = {each.name: each.default for each in fields(CheckpointConfig)}
    assert {**written, "signals": (*written["signals"],)} == {key: defaults[key] for key in written}
