"""Determines the reproducibility level of a run, from bitwise to none, and the differences that lower it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it imports torch, for which those who only read a level do not wait
    from worldsize.record.determinism import Determinism

LEVELS = ("none", "tolerance", "same-topology bitwise", "bitwise")
NOT_TRAINED = (
    *("run", "launch", "launcher", "logger", "listeners", "observe", "checkpoint", "allow_targets", "faults"),
    "autoscale",
)
_NOT_COMPUTED = (*NOT_TRAINED, "strategy", "cluster", "reproducibility")


@dataclass(frozen=True)
class ReproducibilityLevel:
    """A claim of how exactly a run can be re-created: ``level`` is one of LEVELS, ``why`` its reason."""

    level: str
    why: str


class Downgrade(NamedTuple):
    """A difference between a record and this machine, and the highest level that it allows."""

    level: str
    reason: str


def promised_level(determinism: Determinism) -> ReproducibilityLevel:
    """Return the level that a run has by its reproducibility mode alone."""
    if determinism.reduce == "ordered":
        why = "a function of configuration and seed at any number of processes that divides the logical ranks"
        return ReproducibilityLevel("bitwise", f"{why}; on this CPU or GPU model and this torch build")
    if determinism.deterministic:
        why = "deterministic kernels, pinned threads and libraries; sums depend on the number of processes"
        return ReproducibilityLevel("same-topology bitwise", why)
    return ReproducibilityLevel("tolerance", f"reproducibility={determinism.mode} does not pin kernels and threads")


def downgrades(original: Mapping[str, Any], present: Mapping[str, Any]) -> list[Downgrade]:
    """List the differences between two manifests that downgrade the first one's level for the second."""
    differences = (*_config(original, present), *_machine(original, present), *_code(original, present))
    return [*resume_downgrades(original), *differences]


def resume_downgrades(manifest: Mapping[str, Any]) -> list[Downgrade]:
    """List the downgrades of a run that changed on its way, which no single run can repeat.

    It was resumed with another configuration, or it went on without processes that died, or with others.
    """
    is_ordered = manifest["determinism"]["reduce"] == "ordered"
    reasons = [] if is_ordered else list(_memberships(manifest))
    for resumed in manifest.get("resumed", ()):
        for key, then, now in resumed["changes"]:
            reason = f"{key}: {then} at first, {now} from attempt {resumed['attempt']} on"
            if key.split(".")[0] not in _NOT_COMPUTED:
                reasons.append(Downgrade("none", reason))
            elif key.startswith(_DECIDE_BITS):
                reasons.append(Downgrade("tolerance", reason))
            elif key.startswith(_DECIDE_SUMS) and (not is_ordered or _divides_layers_anew(key, then, now)):
                reasons.append(Downgrade("tolerance", f"{reason}, and sums depend on it"))
    return reasons


def _divides_layers_anew(key: str, then: Any, now: Any) -> bool:
    """Return whether a key says among how many ranks a layer or the chain of layers is divided, and has changed."""
    return key in ("strategy.tensor", "strategy.pipeline") and (then or 1) != (now or 1)


def _memberships(manifest: Mapping[str, Any]) -> Iterator[Downgrade]:
    for attempt in manifest["attempts"]:
        for each in attempt.get("memberships", ())[1:]:
            trained = f"{len(each['members'])} processes trained from step {each['first'] + 1} on"
            yield Downgrade("tolerance", f"attempt {attempt['number']}: {trained}, and sums depend on it")


def downgraded_level(
    original: Mapping[str, Any], present: Mapping[str, Any], reasons: Sequence[Downgrade]
) -> ReproducibilityLevel:
    """Return the lowest of both runs' levels and of those that ``reasons`` allow."""
    recorded = [recorded_level(run) for run in (original, present)]
    lowest = min([*(Downgrade(each.level, each.why) for each in recorded), *reasons], key=_height)
    why = [each.reason for each in reasons] or [lowest.reason]
    return ReproducibilityLevel(lowest.level, "; ".join(why))


def recorded_level(manifest: Mapping[str, Any]) -> ReproducibilityLevel:
    """Return the level that the manifest names, or "none" if it is too old to name one."""
    level = manifest.get("reproducibility")
    return (
        ReproducibilityLevel(level["level"], level["why"])
        if level
        else ReproducibilityLevel("none", "the record names no level")
    )


def _height(downgrade: Downgrade) -> int:
    return LEVELS.index(downgrade.level)


def changes(
    then: Mapping[str, Any], now: Mapping[str, Any], but: Sequence[str] = _NOT_COMPUTED
) -> list[tuple[str, Any, Any]]:
    """Return the keys not below ``but`` that differ between two configurations, with both values."""
    first, second = _flat(then), _flat(now)
    keys = [key for key in sorted(first.keys() | second.keys()) if key.split(".")[0] not in but]
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def changes_but(changes: Sequence[tuple[str, Any, Any]], ignore: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Return the changes that are not below a key in ``ignore``, and do not follow from one."""
    accepted = [(then, now) for key, then, now in changes if _is_below(key, ignore)]
    return [each for each in changes if not _is_below(each[0], ignore) and (each[1], each[2]) not in accepted]


def without_copies(changes: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Leave out what an interpolation changes along: a key of the same name and values as one that is less deep."""
    kept: list[tuple[str, Any, Any]] = []
    for key, then, now in sorted(changes, key=lambda change: change[0].count(".")):
        of_one_name = (other for other in kept if other[0].rpartition(".")[2] == key.rpartition(".")[2])
        if not any(other[1:] == (then, now) and other[0].count(".") < key.count(".") for other in of_one_name):
            kept.append((key, then, now))
    return sorted(kept, key=lambda change: change[0])


def _is_below(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _config(original: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Downgrade]:
    for key, then, now in changes(original["config"], present["config"]):
        yield Downgrade("none", f"{key}: {then} then, {now} now: another experiment")


def keys_of(node: Any, path: str = "") -> Iterator[str]:
    """Yield each key of a configuration, also of its sections."""
    if path:
        yield path
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from keys_of(child, f"{path}.{name}" if path else str(name))


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {path: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flat(child, f"{path}.{name}" if path else str(name)).items()
    }


def _machine(original: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Downgrade]:
    for what, path in _DECIDES_BITS.items():
        then, now = _at(original, path), _at(present, path)
        if then != now:
            yield Downgrade("tolerance", f"{what}: {then} then, {now} now")
    yield from _variables(original["determinism"].get("environment", {}), present["determinism"].get("environment", {}))
    then, now = (manifest["determinism"].get("order", 1) for manifest in (original, present))
    if orders_differ(then, now, original):
        yield Downgrade("tolerance", f"order of samples: {then} then, {now} now")
    for key in ("tensor", "pipeline"):  # no order of sums over logical ranks makes up for it
        then, now = (manifest["config"].get("strategy", {}).get(key) for manifest in (original, present))
        if _divides_layers_anew(f"strategy.{key}", then, now):
            yield Downgrade("tolerance", f"strategy.{key}: {then or 1} then, {now or 1} now, and sums depend on it")
    if original["determinism"]["reduce"] == "ordered":
        return
    for what, path in _DECIDES_SUMS.items():
        then, now = _at(original, path), _at(present, path)
        if then != now:
            yield Downgrade("tolerance", f"{what}: {then} then, {now} now, and sums depend on it")


def _variables(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Downgrade]:
    for name in sorted(then.keys() | now.keys()):
        before, after = then.get(name, "unset"), now.get(name, "unset")
        if before != after and not _NO_BITS.fullmatch(name):
            yield Downgrade("tolerance", f"{name}: {before} then, {after} now")


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
    "threads a process": ("determinism", "threads_per_process"),
}
# environment variables that are recorded and change no bit: where files lie, who runs what, what is logged, and over
# which interface messages travel
_NO_BITS = re.compile(
    r"\w+_CACHE_DIR|SLURM_JOB_ID|SKYPILOT_TASK_ID|NCCL_DEBUG\w*|TORCH_DISTRIBUTED_DEBUG|TORCH_FR_\w+|GLOO_SOCKET_IFNAME"
)

_DECIDE_BITS = ("cluster.device", "cluster.backend", "cluster.threads", "reproducibility.")
_DECIDE_SUMS = ("cluster.processes", "strategy.")
_DECIDES_SUMS = {"processes": ("cluster", "processes"), "strategy": ("config", "strategy")}


def orders_differ(then: int, now: int, manifest: Mapping[str, Any]) -> bool:
    """Return whether two versions of the order of samples may differ for the data that ``manifest`` records.

    Version 2 changed that of more than 2²² samples, which take at least as many bytes, and version 3 that of batches
    of similar length.
    """
    recorded_bytes = sum(file["size"] for file in manifest["data"]["files"].values())
    changed = {2: recorded_bytes > 1 << 22, 3: bool(manifest["config"].get("length_balanced"))}
    return any(changed.get(version, True) for version in range(min(then, now) + 1, max(then, now) + 1))


def _at(manifest: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        manifest = manifest[key] if isinstance(key, int) else manifest.get(key)
    return manifest


def _code(original: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Downgrade]:
    then, now = original["code"], present["code"]
    if then["left_out"]:
        yield Downgrade("tolerance", f"files that the record lacks: {', '.join(then['left_out'])}")
    if then["scrubbed"]:
        yield Downgrade("tolerance", "a secret was taken out of the recorded changes")
    digests = {plugin["name"]: plugin["sha256"] for plugin in present.get("plugins", ())}
    for plugin in original.get("plugins", ()):
        is_in_code = plugin["source"] in ("worldsize", "project")  # which the commit and its patch tell more exactly
        if not is_in_code and (digest := digests.get(plugin["name"])) != plugin["sha256"]:
            yield Downgrade("tolerance", f"files of {plugin['name']}: {plugin['sha256']} then, {digest} now")
    if then["framework"] != now["framework"]:
        before, after = _worldsize(then["framework"]), _worldsize(now["framework"])
        yield Downgrade("tolerance", f"worldsize itself: {before} then, {after} now")


def _worldsize(facts: Mapping[str, str | None] | None) -> str:
    """Name the code of a worldsize that is a clone beside the project; None: it is none, or the project itself."""
    if facts is None:
        return "no clone of its own"
    return f"commit {facts['commit']}" + (f" with the changes {facts['patch_sha256']}" if facts["patch_sha256"] else "")
