"""Reproducibility levels, from bitwise to none, and the differences that lower them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # imports torch, which is too slow for reading a level
    from worldsize.record.determinism import Determinism

LEVELS = ("none", "tolerance", "same-topology bitwise", "bitwise")
NOT_TRAINED = (
    *(
        "run",
        "launch",
        "launcher",
        "logger",
        "listeners",
        "observe",
        "profile",
        "checkpoint",
        "allow_targets",
        "faults",
        "integrity",
    ),
    "autoscale",
    "spike",
)
_NOT_COMPUTED = (*NOT_TRAINED, "strategy", "cluster", "reproducibility")


@dataclass(frozen=True)
class ReproducibilityLevel:
    """How exactly a run can be reproduced: one of LEVELS, with the reason."""

    level: str
    why: str


class Downgrade(NamedTuple):
    """A difference between two runs, and the highest level that it allows."""

    level: str
    reason: str


def get_promised_level(determinism: Determinism) -> ReproducibilityLevel:
    """Return the reproducibility level that a mode guarantees."""
    if determinism.reduce == "ordered":
        why = (
            "depends only on the configuration and the seed, for any number of processes and any mesh compatible "
            "with logical_ranks,"
        )
        allowed = f"{why} logical_tensor and logical_context, on this CPU or GPU model and torch build"
        return ReproducibilityLevel("bitwise", allowed)
    if determinism.deterministic:
        why = "deterministic kernels, pinned threads and libraries; sums depend on the number of processes"
        return ReproducibilityLevel("same-topology bitwise", why)
    return ReproducibilityLevel("tolerance", f"reproducibility={determinism.mode} does not pin kernels and threads")


def downgrades(original: Mapping[str, Any], present: Mapping[str, Any]) -> list[Downgrade]:
    """List differences that lower the ``original`` run's level in the ``present`` run."""
    differences = (
        *_compare_configs(original, present),
        *_compare_machines(original, present),
        *_compare_code(original, present),
    )
    return [*resume_downgrades(original), *differences]


def resume_downgrades(manifest: Mapping[str, Any]) -> list[Downgrade]:
    """List the downgrades of a run that changed midway, so that a single run cannot repeat it.

    Such a run was resumed with a different configuration, or its processes changed during an attempt.
    """
    is_ordered = manifest["determinism"]["reduce"] == "ordered"
    reasons = [] if is_ordered else list(_memberships(manifest))
    for resumed in manifest.get("resumed", ()):
        for key, then, now in resumed["changes"]:
            reason = f"{key}: {then} -> {now} in attempt {resumed['attempt']}"
            if key == "skip_samples":
                continue  # only later steps may change, so a single run with the last value has the same bits
            if key.split(".")[0] not in _NOT_COMPUTED or key == "checkpoint.ignore":
                reasons.append(Downgrade("none", reason))
            elif key.startswith(_DECIDE_BITS):
                reasons.append(Downgrade("tolerance", reason))
            elif key.startswith(_DECIDE_SUMS) and not is_ordered:
                reasons.append(Downgrade("tolerance", f"{reason}, which affects sums"))
    return reasons


def _memberships(manifest: Mapping[str, Any]) -> Iterator[Downgrade]:
    for attempt in manifest["attempts"]:
        for each in attempt.get("memberships", ())[1:]:
            trained = f"{len(each['members'])} processes trained from step {each['first'] + 1}"
            yield Downgrade("tolerance", f"attempt {attempt['number']}: {trained}, which affects sums")


def downgrade_level(
    original: Mapping[str, Any], present: Mapping[str, Any], reasons: Sequence[Downgrade]
) -> ReproducibilityLevel:
    """Return the lowest level among both runs' recorded levels and ``reasons``."""
    recorded = [read_recorded_level(run) for run in (original, present)]
    lowest = min([*(Downgrade(each.level, each.why) for each in recorded), *reasons], key=_get_level_index)
    why = [each.reason for each in reasons] or [lowest.reason]
    return ReproducibilityLevel(lowest.level, "; ".join(why))


def read_recorded_level(manifest: Mapping[str, Any]) -> ReproducibilityLevel:
    """Return the level in the manifest, or "none" for an old manifest without a level."""
    level = manifest.get("reproducibility")
    return (
        ReproducibilityLevel(level["level"], level["why"])
        if level
        else ReproducibilityLevel("none", "the record has no reproducibility level")
    )


def _get_level_index(downgrade: Downgrade) -> int:
    return LEVELS.index(downgrade.level)


def find_changes(
    then: Mapping[str, Any], now: Mapping[str, Any], but: Sequence[str] = _NOT_COMPUTED
) -> list[tuple[str, Any, Any]]:
    """Return the keys that differ, with both values; sections ``but`` are ignored."""
    first, second = _flatten_config(then), _flatten_config(now)
    keys = [key for key in sorted(first.keys() | second.keys()) if key.split(".")[0] not in but]
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def changes_but(changes: Sequence[tuple[str, Any, Any]], ignore: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Drop changes at or below a key in ``ignore``, and all changes with the same values."""
    accepted = [(then, now) for key, then, now in changes if _is_below(key, ignore)]
    return [each for each in changes if not _is_below(each[0], ignore) and (each[1], each[2]) not in accepted]


def drop_copies(changes: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Drop copies made by interpolation.

    A copy has the same last name and the same values as a change of a less nested key.
    """
    kept: list[tuple[str, Any, Any]] = []
    for key, then, now in sorted(changes, key=lambda change: change[0].count(".")):
        of_one_name = (other for other in kept if other[0].rpartition(".")[2] == key.rpartition(".")[2])
        if not any(other[1:] == (then, now) and other[0].count(".") < key.count(".") for other in of_one_name):
            kept.append((key, then, now))
    return sorted(kept, key=lambda change: change[0])


def _is_below(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _compare_configs(original: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Downgrade]:
    for key, then, now in find_changes(original["config"], present["config"]):
        yield Downgrade("none", f"{key}: {then} -> {now}, a different experiment")


def list_keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield all dotted keys of a configuration, including those of sections."""
    if path:
        yield path
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from list_keys(child, f"{path}.{name}" if path else str(name))


def _flatten_config(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {path: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flatten_config(child, f"{path}.{name}" if path else str(name)).items()
    }


def _compare_machines(original: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Downgrade]:
    for what, path in _DECIDES_BITS.items():
        then, now = _get_value(original, path), _get_value(present, path)
        if then != now:
            yield Downgrade("tolerance", f"{what}: {then} -> {now}")
    yield from _variables(original["determinism"].get("environment", {}), present["determinism"].get("environment", {}))
    then, now = (manifest["determinism"].get("order", 1) for manifest in (original, present))
    if orders_differ(then, now, original):
        yield Downgrade("tolerance", f"sample order: {then} -> {now}")
    if original["determinism"]["reduce"] == "ordered":
        return
    for what, path in _DECIDES_SUMS.items():
        then, now = _get_value(original, path), _get_value(present, path)
        if then != now:
            yield Downgrade("tolerance", f"{what}: {then} -> {now}, which affects sums")


def _variables(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Downgrade]:
    for name in sorted(then.keys() | now.keys()):
        before, after = then.get(name, "unset"), now.get(name, "unset")
        if before != after and not _NO_BITS.fullmatch(name):
            yield Downgrade("tolerance", f"{name}: {before} -> {after}")


_DECIDES_BITS = {
    "reproducibility": ("determinism", "mode"),
    "Python": ("environment", "python"),
    "torch": ("environment", "torch"),
    "numpy": ("environment", "packages", "numpy"),
    "driver": ("environment", "driver"),
    "CPU": ("hardware", 0, "cpu"),
    "vector instructions": ("environment", "vector_instructions"),
    "GPUs": ("hardware", 0, "gpus"),
    "backend": ("cluster", "backend"),
    "device": ("config", "cluster", "device"),
    "threads per process": ("determinism", "threads_per_process"),
}
# recorded environment variables that do not affect results: file locations, job IDs, logging, and the network
# interface
_NO_BITS = re.compile(
    r"\w+_CACHE_DIR|SLURM_JOB_ID|SKYPILOT_TASK_ID|NCCL_DEBUG\w*|TORCH_DISTRIBUTED_DEBUG|TORCH_FR_\w+|GLOO_SOCKET_IFNAME"
)

_DECIDE_BITS = ("cluster.device", "cluster.backend", "cluster.threads", "reproducibility.")
_DECIDE_SUMS = ("cluster.processes", "strategy.")
_DECIDES_SUMS = {"processes": ("cluster", "processes"), "strategy": ("config", "strategy")}


def orders_differ(then: int, now: int, manifest: Mapping[str, Any]) -> bool:
    """Return whether two versions of the sample order may differ for the data of ``manifest``.

    Version 2 changed the order of more than 2²² samples, which is only possible with more than 2²² bytes of data.
    Version 3 changed the order of length-balanced batches.
    """
    recorded_bytes = sum(file["size"] for file in manifest["data"]["files"].values())
    changed = {2: recorded_bytes > 1 << 22, 3: bool(manifest["config"].get("length_balanced"))}
    return any(changed.get(version, True) for version in range(min(then, now) + 1, max(then, now) + 1))


def _get_value(manifest: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        manifest = manifest[key] if isinstance(key, int) else manifest.get(key)
    return manifest


def _compare_code(original: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Downgrade]:
    then, now = original["code"], present["code"]
    if then["left_out"]:
        yield Downgrade("tolerance", f"files missing from the record: {', '.join(then['left_out'])}")
    if then["scrubbed"]:
        yield Downgrade("tolerance", "a secret was removed from the recorded changes")
    digests = {plugin["name"]: plugin["sha256"] for plugin in present.get("plugins", ())}
    for plugin in original.get("plugins", ()):
        is_in_code = plugin["source"] in ("worldsize", "project")  # covered by the commit and its patch
        if not is_in_code and (digest := digests.get(plugin["name"])) != plugin["sha256"]:
            yield Downgrade("tolerance", f"files of {plugin['name']}: {plugin['sha256']} -> {digest}")
    if then["framework"] != now["framework"]:
        before, after = _worldsize(then["framework"]), _worldsize(now["framework"])
        yield Downgrade("tolerance", f"worldsize: {before} -> {after}")


def _worldsize(facts: Mapping[str, str | None] | None) -> str:
    """Describe the commit of a worldsize clone; ``facts`` is None without a separate clone."""
    if facts is None:
        return "no separate clone"
    return f"commit {facts['commit']}" + (f" with the changes {facts['patch_sha256']}" if facts["patch_sha256"] else "")
