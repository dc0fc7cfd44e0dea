"""The reproducibility level in a manifest, and its downgrades."""

from __future__ import annotations

from typing import Any

import pytest

from worldsize.record.level import (
    Downgrade,
    ReproducibilityLevel,
    _compare_machines,
    downgrade_level,
    downgrades,
    read_recorded_level,
    resume_downgrades,
)

BITWISE = {"reproducibility": {"level": "bitwise", "why": "on this CPU"}}
TOLERANCE = {"reproducibility": {"level": "tolerance", "why": "kernels are not pinned"}}


def test_the_lowest_level_counts_and_says_why() -> None:
    assert downgrade_level(BITWISE, BITWISE, []) == ReproducibilityLevel("bitwise", "on this CPU")
    assert downgrade_level(BITWISE, TOLERANCE, []) == ReproducibilityLevel("tolerance", "kernels are not pinned")
    reasons = [Downgrade("tolerance", "other torch"), Downgrade("none", "other lr")]
    assert downgrade_level(BITWISE, BITWISE, reasons) == ReproducibilityLevel("none", "other torch; other lr")


def test_a_manifest_too_old_to_name_its_level_has_none() -> None:
    assert read_recorded_level({}).level == "none"
    assert downgrade_level({}, BITWISE, []) == read_recorded_level({})


def manifest(size: int = 100, **determinism: object) -> dict[str, Any]:
    code: dict[str, Any] = {"commit": None, "patch_sha256": None, "left_out": [], "scrubbed": False, "framework": None}
    shared = {"environment": {"packages": {}}, "hardware": [{}], "cluster": {}, "code": code, "config": {"cluster": {}}}
    data = {"files": {"tokens": {"size": size, "sha256": ""}, "text": {"size": 3, "sha256": ""}}}
    return {**shared, "data": data, "determinism": {"reduce": "ordered", **determinism}}


def test_another_order_of_samples_is_another_result() -> None:
    assert downgrades(manifest(order=2), manifest(order=2)) == []
    expected = [Downgrade("tolerance", "sample order: 3 -> 4")]
    assert downgrades(manifest(order=3), manifest(order=4)) == expected


def test_variables_that_change_bits_are_named_and_those_of_a_user_or_a_job_are_none() -> None:
    then = {
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_ada",
        "SLURM_JOB_ID": "7",
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG": "",
    }
    now = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_bob", "SLURM_JOB_ID": "8", "ATEN_CPU_CAPABILITY": "default"}
    assert downgrades(manifest(environment=then), manifest(environment=now)) == [
        Downgrade("tolerance", "ATEN_CPU_CAPABILITY: unset -> default"),
        Downgrade("tolerance", "NCCL_ALGO: Ring -> unset"),
    ]


def test_another_clone_of_worldsize_is_named_by_its_commit() -> None:
    def trained_with(framework: dict[str, Any] | None) -> dict[str, Any]:
        one = manifest()
        return {**one, "code": {**one["code"], "framework": framework}}

    then, now = {"commit": "c0ffee", "patch_sha256": None}, {"commit": "c0ffee", "patch_sha256": "ab"}
    (found,) = downgrades(trained_with(then), trained_with(now))
    assert found.reason == "worldsize: commit c0ffee -> commit c0ffee with the changes ab"
    (found,) = downgrades(trained_with(None), trained_with(then))
    assert found.reason == "worldsize: no separate clone -> commit c0ffee"


@pytest.mark.parametrize("balanced", [False, True])
def test_version_3_of_the_order_is_another_where_batches_are_of_similar_length_alone(balanced: bool) -> None:
    then, now = manifest(order=2), manifest(order=3)
    for each in (then, now):
        each["config"]["length_balanced"] = balanced
    assert bool(downgrades(then, now)) == balanced


def test_another_division_of_layers_lowers_the_level_unless_sums_are_ordered() -> None:
    """Ordered runs divide layers into logical slices, whose number is a key of the experiment."""

    def divided(reduce: str, **strategy: object) -> dict[str, Any]:
        one = manifest()
        determinism = {**one["determinism"], "reduce": reduce}
        config = {**one["config"], "strategy": strategy}
        return {**one, "determinism": determinism, "config": config, "resumed": [], "attempts": []}

    changes = [["strategy.tensor", None, 2], ["strategy.pipeline", None, 4]]
    for reduce, levels in (("ordered", []), ("flat", ["tolerance"])):
        one, other = divided(reduce, tensor=1, pipeline=1), divided(reduce, tensor=2, pipeline=4)
        assert [each.level for each in _compare_machines(one, other)] == levels
        other["resumed"] = [{"attempt": 2, "changes": changes}]
        assert [each.level for each in resume_downgrades(other)] == levels * 2


def test_a_record_without_a_version_of_the_order_has_the_first_which_small_data_keep() -> None:
    assert downgrades(manifest(), manifest(order=2)) == []
    expected = [Downgrade("tolerance", "sample order: 1 -> 2")]
    assert downgrades(manifest(size=1 << 23), manifest(order=2)) == expected
