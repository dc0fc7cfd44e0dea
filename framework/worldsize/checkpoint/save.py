"""Write checkpoints in the background. Training waits only for copies of CPU tensors; GPU copies are asynchronous."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from worldsize.checkpoint import format
from worldsize.checkpoint.format import (
    Retention,
    complete,
    folder_name,
    parse_step,
    read_checkpoint,
    sync_folder,
    verify_checkpoint,
)
from worldsize.checkpoint.holders import partly_held, select_tensors_to_write
from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.checkpoint.storage import Writer
from worldsize.collectives.per_rank import get_local_shard, shard_like
from worldsize.core import CheckpointSaved, StateDict, World
from worldsize.devices import record_queued_work
from worldsize.errors import CheckpointError, OtherSchemaError, RunFolderError, SaveFailedError


def _ignore_point(point: str) -> None: ...


@final
class Saver:
    """Writer of one checkpoint at a time; all ranks must call its methods in the same order.

    Args:
        root: Folder of the checkpoints.
        world: The ranks that save.
        group: A gloo group of the role for exclusive use by the background thread, which communicates during training;
            None for a single process.
        keep: Retention policy.
        finite: Whether to refuse to save a model with NaN or infinity, so that older checkpoints are kept.
        owner: A file that must exist for a save, such as the run's manifest, so that a deleted run folder is not
            recreated.
        at: Called at named points, for fault injection in tests.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        group: ProcessGroup | None,
        *,
        keep: Retention,
        finite: bool = False,
        owner: Path | None = None,
        at: Callable[[str], None] = _ignore_point,
    ) -> None:
        self._root, self._world, self._group = root, world, group
        self._keep, self._finite, self._owner, self._at = keep, finite, owner, at
        self._buffers: dict[str, Tensor] = {}
        self._names: set[str] = set()  # tensor names of the previous save
        self._partly: dict[str, Tensor] = {}  # result of partly_held for these tensors
        self._files = threading.Lock()  # held while rank 0 creates or publishes a draft
        self._pending: Future[CheckpointSaved | None] | None = None

    def save(
        self, state: StateDict, *, step: int, facts: Mapping[str, Any], streams: Mapping[str, Tensor] | None = None
    ) -> list[CheckpointSaved]:
        """Wait for the previous save, start a new one, and return the events of the previous one.

        Args:
            state: The state, with tensors of any shapes. CPU tensors are copied before the call returns; GPU tensors
                are copied on the current stream, before any work queued later.
            step: Number of the last completed step.
            facts: Plain values to store with the checkpoint.
            streams: CPU tensors that only this rank has, for the parts in ``format.ALONE``. They are not copied, and
                their shapes are not exchanged between ranks.

        Raises:
            SaveFailedError: the previous save had a storage error on some rank; call again to start this save.
            CheckpointError: the previous save failed on some rank for a reason that would fail this save, too.
        """
        ended = self.finish()
        self._at("checkpoint:begin")
        tensors, values = split_tensors(state)
        if self._names != tensors.keys():
            self._names, self._partly = set(tensors), partly_held(tensors, self._world)
        mine = {
            **self._copy_to_host(dict(select_tensors_to_write(tensors, self._partly, self._world))),
            **(streams or {}),
        }
        copied = record_queued_work(self._world.device)
        head = {"step": step, "world_size": self._world.size, "values": values, "facts": dict(facts)}
        digest = _tensors_digest(tensors)
        self._pending = _start_thread(partial(self._write_checkpoint, copied, mine, head, step, digest))
        return ended

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight or its result has not been collected yet."""
        return self._pending is not None

    def collect_finished_save(self) -> list[CheckpointSaved]:
        """Return the events of the pending save if it has ended; raise its error if it failed."""
        return self.finish() if self._pending and self._pending.done() else []

    def finish(self) -> list[CheckpointSaved]:
        """Wait for the pending save, if any, and return its events; raise its error if it failed."""
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        saved = pending.result()
        return [saved] if saved else []

    def regroup_ranks(self, world: World, group: ProcessGroup | None) -> Saver:
        """Return a saver for a new set of ranks.

        A save in flight keeps its ranks, group and buffers, and fails if the group is gone. Its result is discarded,
        and the next save does not wait for it: gloo may wait for a lost rank until the timeout.
        """
        other = copy(self)
        other._world, other._group, other._pending, other._names = world, group, None, set()
        unsharded = {name: buffer for name, buffer in self._buffers.items() if not isinstance(buffer, DTensor)}
        other._buffers = {} if self.is_writing else unsharded  # old shards do not fit the new ranks
        return other

    def close(self) -> None:
        """Wait for the save in flight, if any, and ignore its result."""
        if self._pending is not None:
            wait([self._pending])

    def _copy_to_host(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy tensors to reusable host buffers; copies from a GPU are asynchronous."""
        self._buffers = {name: _reuse_buffer(self._buffers.get(name), tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            _detach_local(self._buffers[name]).copy_(_detach_local(tensor), non_blocking=True)
        return self._buffers

    def _write_checkpoint(
        self,
        copied: Callable[[], None],
        tensors: Mapping[str, Tensor],
        head: Mapping[str, Any],
        step: int,
        tensors_digest: str,
    ) -> CheckpointSaved | None:
        """Write and publish a checkpoint in the background thread, after ``copied()`` returns.

        Every phase ends with an exchange, so a failure on one rank fails the save on all ranks. After a storage error,
        all ranks stop after the same exchange, so that they are still in sync for the next save.
        """
        final_ = self._root / folder_name(step)
        folder = self._run_on_rank_0(step, lambda: self._create_draft(final_))
        if folder is None:
            return None
        writer = Writer(
            folder, self._world.rank, head=head, tensors_digest=tensors_digest, finite=self._finite, at=self._at
        )
        copied()
        try:
            save(dict(tensors), storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except (CheckpointException, OSError, RuntimeError) as error:
            newest = None
            if not isinstance(error, RuntimeError):  # a RuntimeError means a lost rank: no more exchanges
                newest = self._run_on_rank_0(step, lambda: _discard_draft(folder))  # the draft may fill the disk
            if _is_of_storage(error):
                raise SaveFailedError(step, _format_reasons(error), newest) from error
            raise CheckpointError(
                f"failed to write the checkpoint of step {step}: {_format_reasons(error)}."
            ) from error
        self._run_on_rank_0(step, lambda: self._publish_draft(folder, final_))
        return CheckpointSaved(step, final_)

    def _create_draft(self, final_: Path) -> Path | None:
        """Create a draft folder and remove stale ones; return None if the step is already saved."""
        self._check_owner()
        if final_.exists() and _is_valid(final_):
            return None
        self._root.mkdir(parents=self._owner is None, exist_ok=True)
        for stale in self._root.glob(".step_*"):
            shutil.rmtree(stale)
        folder = self._root / f".{final_.name}.{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def _check_owner(self) -> None:
        if self._owner is not None and not self._owner.exists():
            raise RunFolderError(f"the run folder {self._owner.parent} was deleted")

    def _publish_draft(self, folder: Path, final_: Path) -> None:
        """Publish the folder with one durable rename, then delete expired checkpoints, on rank 0."""
        self._check_owner()
        if final_.exists():  # damaged, since training resumed from an older one
            final_.rename(self._root / f".step_damaged_{secrets.token_hex(4)}")
        folder.rename(final_)
        sync_folder(self._root)
        self._at("checkpoint:after-rename")
        try:
            format.apply_retention(self._keep, final_, self._at)
        except OSError as error:
            said = f"the checkpoint is complete, but deleting old checkpoints failed: {error.strerror}"
            raise OSError(error.errno, said, error.filename) from error

    def _run_on_rank_0(self, step: int, task: Callable[[], Any]) -> Any:
        """Run ``task`` on rank 0; return its result or raise its error on every rank."""
        answer: list[Any] = [None, None, None]  # result, failure reason, and for storage errors (newest step,)
        if self._world.rank == 0:
            try:
                with self._files:
                    answer[0] = task()
            except OSError as error:
                answer[1:] = f"{error.strerror}: {error.filename}", (_newest_step(self._root),)
            except RunFolderError as error:
                answer[1] = str(error)
            except Exception as error:  # any error, since the other ranks wait for an answer
                answer[1] = f"{type(error).__name__}: {error}"
        if self._group is not None:
            dist.broadcast_object_list(answer, group=self._group, group_src=0)
        result, reason, refused = answer
        if refused is not None:
            raise SaveFailedError(step, reason, refused[0])
        if reason is not None:
            raise CheckpointError(f"failed to write the checkpoint of step {step}: {reason}.")
        return result


def _start_thread(write: Callable[[], CheckpointSaved | None]) -> Future[CheckpointSaved | None]:
    """Run ``write`` in a daemon thread of low priority, so that a wait for a lost rank does not delay the exit."""
    future: Future[CheckpointSaved | None] = Future()

    def run() -> None:
        _give_way()
        try:
            future.set_result(write())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="checkpoint").start()
    return future


def _give_way() -> None:
    """Lower this thread's priority; on Linux, niceness is per thread (setpriority(2))."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _is_valid(path: Path) -> bool:
    """Return whether a folder holds a valid checkpoint. Raises OtherSchemaError, see :func:`read_checkpoint`."""
    try:
        verify_checkpoint(read_checkpoint(path))
    except OtherSchemaError:
        raise
    except CheckpointError:
        return False
    return True


def _discard_draft(folder: Path) -> int | None:
    """Delete a draft that may have filled the disk; return the newest complete step, if any."""
    shutil.rmtree(folder, ignore_errors=True)
    return _newest_step(folder.parent)


def _newest_step(root: Path) -> int | None:
    try:
        return max(map(parse_step, complete(root)), default=None)
    except OSError:  # the storage error also affects reading
        return None


def _is_of_storage(error: BaseException) -> bool:
    """Return whether all failures are storage errors; torch raises the same error on all ranks.

    Other failures, such as NaN in the model or an unsupported dtype, would recur in the next save.
    """
    if not isinstance(error, CheckpointException):
        return False
    return all(isinstance(failure, OSError) for failure, _ in error.failures.values())


def _format_reasons(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))


def _detach_local(tensor: Tensor) -> Tensor:
    return get_local_shard(tensor).detach()


def _get_layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties that two tensors must share to be copied without conversion."""
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return tensor.dtype, tensor.shape, placements, _detach_local(tensor).shape


def _reuse_buffer(old: Tensor | None, tensor: Tensor) -> Tensor:
    """Return ``old`` if ``tensor`` fits into it, otherwise a new host buffer."""
    return old if old is not None and _get_layout(old) == _get_layout(tensor) else _host_like(tensor)


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the tensors' names, dtypes and shapes, which must be equal on all ranks."""
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _host_like(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    part = torch.empty_like(
        _detach_local(tensor), device="cpu", memory_format=torch.contiguous_format, pin_memory=pinned
    )
    return shard_like(tensor, part) if isinstance(tensor, DTensor) else part
