"""Load the newest valid checkpoint, or weights from files, at any world size.

The planners of torch.distributed.checkpoint fill each rank's tensors in place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from worldsize.checkpoint.format import (
    ALONE,
    HYPERPARAMETERS,
    PARTS,
    Checkpoint,
    complete,
    read_checkpoint,
    verify_checkpoint,
)
from worldsize.checkpoint.manifest_tree import join_tensors, order_like, split_tensors
from worldsize.checkpoint.safetensors import DTYPES, Entry
from worldsize.checkpoint.storage import PlannedReader, Reader, get_item_slices
from worldsize.checkpoint.weights import Weights
from worldsize.core import StateDict, World
from worldsize.errors import CheckpointError, OtherSchemaError

_logger = logging.getLogger(__name__)

_SHOWN = 8  # maximum number of differences in an error message


def find_newest(root: Path, world: World, *, allow_older: bool = False) -> Checkpoint | None:
    """Return the newest valid checkpoint in ``root``; None if there are no checkpoints.

    Each rank hashes a subset of the files; all ranks return the same result.

    Raises:
        CheckpointError: the newest checkpoint is damaged and ``allow_older`` is False, or all are damaged.
        OtherSchemaError: a checkpoint has a schema version that this worldsize cannot read; older ones are not tried.
    """
    folders: list[Path] = _run_on_all_ranks(lambda: complete(root), world)[0]
    for path in reversed(folders):
        errors = [error for error in _run_on_all_ranks(lambda: _find_damage(path, world), world) if error]  # noqa: B023
        if not errors:
            return read_checkpoint(path)
        for error in errors:
            if isinstance(error, OtherSchemaError):
                raise error
        if not allow_older:
            raise CheckpointError(f"{errors[0]} Use --allow-older to resume from an older checkpoint.")
        _logger.warning("%s Trying an older checkpoint.", errors[0])
    if folders:
        raise CheckpointError(
            f"no valid checkpoint found in {root}. Remove the checkpoints to start over, or start a new run."
        )
    return None


def _find_damage(path: Path, world: World) -> CheckpointError | None:
    try:
        checkpoint = read_checkpoint(path)
        verify_checkpoint(checkpoint, sorted(checkpoint.files)[world.rank :: world.size])
    except CheckpointError as error:
        return error.with_traceback(None)
    except OSError as error:
        return CheckpointError(f"failed to read the checkpoint ({error.filename or path}): {error.strerror}.")
    return None


def _run_on_all_ranks(task: Callable[[], Any], world: World) -> list[Any]:
    """Run ``task`` on every rank and all-gather the results, in rank order."""
    if world.group is None:
        return [task()]
    answers = [None] * world.size
    dist.all_gather_object(answers, task(), group=world.group)
    return answers


def load_checkpoint(checkpoint: Checkpoint, template: StateDict, *, ignore: Sequence[str] = ()) -> StateDict:
    """Load a checkpoint into the tensors of ``template``, full or sharded, in place.

    Args:
        checkpoint: The checkpoint, saved at any world size.
        template: The state to fill, with tensors of the saved shapes. A tensor with 0 rows is replaced by one with
            the saved number of rows. Tensors on the meta device belong to other ranks and stay there.
        ignore: Top-level parts of the state that keep the template's values. "hyperparameters" stands for learning
            rates, weight decay etc. The part ``strategy`` is ignored automatically if it was saved by a different
            strategy or with different shapes, e.g. at a different world size.

    Returns:
        The template's tensors and the checkpoint's other values, in the template's order.

    Raises:
        CheckpointError: names, shapes or dtypes differ (no tensor has been changed in that case), or the saved options
            of the optimizer or schedule do not fit the run's (tensors may have been changed).
    """
    # the parts in ALONE are loaded on demand, by read_tensors
    ignore = [*ignore, *ALONE, *_find_unfit_parts(checkpoint, template)]
    tensors, _ = split_tensors({part: child for part, child in template.items() if part not in ignore})
    saved = {name: facts for name, facts in checkpoint.tensors.items() if name.split("/")[0] not in ignore}
    tensors = {name: _resize_empty(tensor, saved.get(name)) for name, tensor in tensors.items()}
    if differences := list(_differences(saved, tensors)):
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.path} does not match the model or optimizer: {'; '.join(differences[:_SHOWN])}{more}. "
            "Resume with the original configuration, or skip a part, e.g. with checkpoint.ignore=[optimizer]."
        )
    held = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    state_dict_loader.load(held, storage_reader=Reader(checkpoint), no_dist=True)
    kept = {part: child for part, child in template.items() if part in ignore}
    values = {part: child for part, child in checkpoint.values.items() if part not in ignore}
    state: StateDict = order_like({**join_tensors(values, tensors), **kept}, template)
    anew = "schedule" in ignore
    if not anew and HYPERPARAMETERS not in ignore:
        return state
    try:
        return _apply_hyperparameters(state, template, anew=anew)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{checkpoint.path} does not match the optimizer or schedule of the run ({kind}). "
            "Skip both with checkpoint.ignore=[optimizer,schedule]."
        ) from None


def _apply_hyperparameters(saved: StateDict, now: StateDict, *, anew: bool) -> StateDict:
    """Return ``saved`` with the optimizer options and initial learning rates of ``now``.

    With ``anew``, the schedule restarts, and learning rates are taken from ``now``.
    """
    pairs = zip(saved["optimizer"]["param_groups"], now["optimizer"]["param_groups"], strict=True)
    groups = [
        {**then, **own, "params": then["params"], **_compute_learning_rate(then, own, anew)} for then, own in pairs
    ]
    optimizer = {**saved["optimizer"], "param_groups": groups}
    return {**saved, "optimizer": optimizer, "schedule": _rebase_schedule(saved["schedule"], now["schedule"])}


def _compute_learning_rate(then: Mapping[str, Any], now: Mapping[str, Any], anew: bool) -> Mapping[str, Any]:
    """Return the learning rate to resume with, as ``{"lr": rate}``; ``{}`` if the group has none.

    A scheduled rate keeps its position in the schedule, i.e. its ratio to the initial rate.
    """
    if anew or not then.get("initial_lr") or "initial_lr" not in now:
        return {"lr": now["lr"]} if "lr" in now else {}
    if then["initial_lr"] == now["initial_lr"]:
        return {"lr": then["lr"]}
    return {"lr": then["lr"] / then["initial_lr"] * now["initial_lr"]}


def _rebase_schedule(then: Any, now: Any) -> Any:
    """Return a schedule's saved state ``then`` with the initial learning rates of ``now``, also for chained ones."""
    if isinstance(then, list):
        return [_rebase_schedule(*pair) for pair in zip(then, now, strict=True)]
    if not isinstance(then, Mapping):
        return then
    return {key: now[key] if key == "base_lrs" else _rebase_schedule(child, now[key]) for key, child in then.items()}


def _find_unfit_parts(checkpoint: Checkpoint, template: StateDict) -> list[str]:
    """Return ``["strategy"]`` if the saved part of that name does not fit the template, otherwise ``[]``."""
    now, _ = split_tensors({part: child for part, child in template.items() if part == "strategy"})
    then = {name: facts for name, facts in checkpoint.tensors.items() if name.startswith("strategy/")}
    fits = ("strategy" in template) == ("strategy" in checkpoint.values)
    return [] if fits and not any(_differences(then, now)) else ["strategy"]


def _resize_empty(tensor: Tensor, saved: Mapping[str, Any] | None) -> Tensor:
    """Return ``tensor``; if it has 0 rows (a growing table), return an uninitialized tensor of the saved shape."""
    grows = (
        saved is not None and tensor.ndim > 0 and tensor.shape[0] == 0 and list(tensor.shape[1:]) == saved["shape"][1:]
    )
    return tensor.new_empty(saved["shape"]) if grows and saved else tensor


def read_tensors(checkpoint: Checkpoint, part: str, *, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read the full tensors of a top-level part of the state, keyed by name within the part.

    Args:
        checkpoint: The checkpoint.
        part: Name of the part.
        only: Names of the tensors to read; None reads all.
    """
    prefix = f"{part}/"
    names = [
        name
        for name in checkpoint.tensors
        if name.startswith(prefix) and (only is None or name.removeprefix(prefix) in only)
    ]
    return {name.removeprefix(prefix): tensor for name, tensor in _read_named(checkpoint, names).items()}


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "params")  # of an optimizer, not its mathematics


def find_differing_value(one: Checkpoint, other: Checkpoint) -> str | None:
    """Return the name of the first value other than tensors that differs, such as a learning rate; None if none does.

    Values of the strategy, and of the implementation of an optimizer, are not compared.
    """
    first, second = (
        {"skipped": each.facts.get("skipped"), **dict(_flatten_values({part: each.values.get(part) for part in PARTS}))}
        for each in (one, other)
    )
    return next((name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)), None)


def _flatten_values(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict | list):
        yield path, node
        return
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        if name not in _IMPLEMENTATION:
            yield from _flatten_values(child, f"{path}/{name}" if path else str(name))


_COMPARED = 256 << 20  # bytes of tensors that are read at once


def find_differing_tensor(one: Checkpoint, other: Checkpoint) -> str | None:
    """Return the name of the first tensor, within the whole state, whose bits or shape differ; None if all are equal.

    The checkpoints may have been written by different numbers of ranks.
    """
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        if name not in one.tensors or name not in other.tensors:
            return name
    for names in _group_tensors(one):
        first, second = (_read_named(each, names) for each in (one, other))
        for name in names:
            one_tensor, other_tensor = first[name], second[name]
            if (one_tensor.dtype, one_tensor.shape) != (other_tensor.dtype, other_tensor.shape):
                return name
            if not has_same_bits(one_tensor, other_tensor):
                return name
    return None


def _group_tensors(checkpoint: Checkpoint) -> Iterator[list[str]]:
    """Yield the names of tensors to read together."""
    group, size = list[str](), 0
    for name, facts in sorted(checkpoint.tensors.items()):
        group.append(name)
        size += math.prod(facts["shape"]) * DTYPES[facts["dtype"]].itemsize
        if size >= _COMPARED:
            yield group
            group, size = [], 0
    if group:
        yield group


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes, in order of their elements."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _read_named(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, Tensor]:
    described = {name: checkpoint.tensors[name] for name in names}
    tensors = {name: torch.empty(facts["shape"], dtype=DTYPES[facts["dtype"]]) for name, facts in described.items()}
    state_dict_loader.load(dict(tensors), storage_reader=Reader(checkpoint), no_dist=True)
    return tensors


def _differences(then: Mapping[str, Any], now: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        saved = _format_tensor(then[name]["dtype"], then[name]["shape"]) if name in then else "absent"
        present = _format_tensor(str(now[name].dtype), now[name].shape) if name in now else "absent"
        if saved != present:
            yield f"{name}: {saved} in the checkpoint, {present} in the run"


def _format_tensor(dtype: str, shape: Any) -> str:
    return f"{dtype.removeprefix('torch.')}{list(shape)}"


def read_into(held: Mapping[str, Tensor], weights: Weights, names: Mapping[str, str]) -> None:
    """Fill this rank's tensors, full or sharded, with values from ``weights``, in place.

    Args:
        held: The tensors by name, with the same full shapes as in ``weights``; for DTensors, only the local shard is
            read.
        weights: The source.
        names: Maps names in ``held`` to names in ``weights``.
    """
    state_dict_loader.load(dict(held), storage_reader=_WeightsReader(weights, names), no_dist=True)


@final
class _WeightsReader(PlannedReader):
    """Storage reader for torch's planners that reads from :class:`Weights`."""

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {name: self._weights.entries[source] for name, source in self._names.items()}
        return Metadata({name: _build_tensor_metadata(entry) for name, entry in entries.items()})

    def read_values(self, item: ReadItem) -> Tensor:
        return self._weights.read_slice(self._names[item.storage_index.fqn], get_item_slices(item))


def _build_tensor_metadata(entry: Entry) -> TensorStorageMetadata:
    shape = torch.Size(entry.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(entry.dtype), shape, [chunk])
