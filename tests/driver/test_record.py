"""The record of a run says what decides its result, and a resumed run is told what has changed since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from worldsize.data.permutation import ORDER
from worldsize.driver.record import check_same
from worldsize.records.redaction import Scrubber
from worldsize.reproducibility.data import fingerprint


@pytest.mark.parametrize(("recorded", "is_told"), [({}, True), ({"order": 1}, True), ({"order": ORDER}, False)])
def test_a_run_begun_with_another_order_of_samples_is_told_so(
    recorded: dict[str, int], *, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = SimpleNamespace(files=dict)
    settings = SimpleNamespace(config={}, recipe=recipe, initial=None)
    record = SimpleNamespace(manifest={"config": {}, "data": fingerprint({}), "determinism": recorded})
    check_same(cast("Any", settings), cast("Any", record), Scrubber(()), ())
    assert ("version 1 of the order of samples" in caplog.text) == is_told
