"""The reproducibility level that a manifest names, and what downgrades it."""

from __future__ import annotations

from worldsize.reproducibility.level import Downgrade, ReproducibilityLevel, downgraded_level, recorded_level

BITWISE = {"reproducibility": {"level": "bitwise", "why": "on this CPU"}}
TOLERANCE = {"reproducibility": {"level": "tolerance", "why": "kernels are not pinned"}}


def test_the_lowest_level_counts_and_says_why() -> None:
    assert downgraded_level(BITWISE, BITWISE, []) == ReproducibilityLevel("bitwise", "on this CPU")
    assert downgraded_level(BITWISE, TOLERANCE, []) == ReproducibilityLevel("tolerance", "kernels are not pinned")
    reasons = [Downgrade("tolerance", "other torch"), Downgrade("none", "other lr")]
    assert downgraded_level(BITWISE, BITWISE, reasons) == ReproducibilityLevel("none", "other torch; other lr")


def test_a_manifest_too_old_to_name_its_level_has_none() -> None:
    assert recorded_level({}).level == "none"
    assert downgraded_level({}, BITWISE, []) == recorded_level({})
