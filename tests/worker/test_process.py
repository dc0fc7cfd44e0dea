"""The first rank of a run that torchrun started keeps the run's record, and says why where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from worldsize.records.manifest import write_manifest
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunRecord
from worldsize.worker import process
from worldsize.world.environments import placement


def test_a_record_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "run_manifest.json"))

    write_manifest(tmp_path / "run_manifest.json", {"attempts": [], "results": None})
    RunDirectory(tmp_path).config.write_text("cluster: {environment: alone}\n")
    monkeypatch.delenv("WORLDSIZE_ATTEMPT", raising=False)
    monkeypatch.setattr(process, "placement", lambda environ, _: placement({}, "alone"))
    monkeypatch.setattr(RunRecord, "begin_attempt", full)
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        process.main()
    assert "cannot be written any more (No space left on device)" in str(ended.value.code)
