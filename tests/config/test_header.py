"""A package header takes effect only at the top of a file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from worldsize.config.compose import compose_and_call, compose_only
from worldsize.core import ConfigError


def warnings_of(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    file = folder / "conf" / "experiment" / "wide.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.chdir(folder)
    with caplog.at_level(logging.WARNING, logger="worldsize"):
        for _ in range(2):  # warns once
            try:
                compose_and_call(lambda cfg: None, ["+experiment=wide"])
            except ConfigError:
                continue
    return caplog.messages


@pytest.mark.parametrize("above", ["# conf/experiment/wide.yaml\n", "# Wide\n\n", "lr: 0.1\n", "---\n"])
def test_a_header_below_something_else_is_warned_of(
    above: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (warning,) = warnings_of(tmp_path, f"{above}#  @package _global_\nsteps: 3\n", caplog, monkeypatch)
    file, line = tmp_path / "conf" / "experiment" / "wide.yaml", above.count("\n") + 1
    assert warning.startswith(f"{file}, line {line}: '#  @package _global_' has no effect")


@pytest.mark.parametrize("text", ["# @package _global_\n", "\n# @package _global_\n", "# Says @package\n", ""])
def test_a_header_at_the_top_has_its_effect_without_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warnings_of(tmp_path, f"{text}steps: 3\n", caplog, monkeypatch) == []
    if text.strip().startswith("# @"):
        assert compose_only(["+experiment=wide"]).steps == 3
