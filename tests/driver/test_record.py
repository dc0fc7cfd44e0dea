"""The record of a run says what decides its result, and a resumed run is told what has changed since."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worldsize.data.permutation import ORDER
from worldsize.driver.record import check_same
from worldsize.records.redaction import Scrubber
from worldsize.reproducibility.data import fingerprint


@pytest.mark.parametrize(
    ("recorded", "size", "is_told"),
    [({}, 5 << 20, True), ({"order": 1}, 5 << 20, True), ({"order": ORDER}, 5 << 20, False), ({}, 1 << 20, False)],
)
def test_a_run_begun_with_another_order_of_many_samples_is_told_so(
    recorded: dict[str, int], size: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens.bin"
    with file.open("wb") as begun:
        begun.truncate(size)
    recipe = SimpleNamespace(files=lambda: {"tokens": file}, fingerprints=dict)
    settings = SimpleNamespace(config={}, recipe=recipe, initial=None)
    record = SimpleNamespace(manifest={"config": {}, "data": fingerprint(recipe.files()), "determinism": recorded})
    check_same(cast("Any", settings), cast("Any", record), Scrubber(()), ())
    assert ("version 1 of the order of samples" in caplog.text) == is_told
