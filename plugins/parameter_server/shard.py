"""A shard: parameters of one server, and their updates. No sockets; callers hold a lock.

``PushReceiver`` receives gradients for it, after checking their announced sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from plugins.parameter_server.gradients import Gradient, GradientCodec, StepGradients, UnitLog
from plugins.parameter_server.protocol import Fields, Operation
from plugins.parameter_server.row_tables import Rows
from plugins.parameter_server.shard_parameters import ShardParameters
from worldsize.net.channel import Channel
from worldsize.net.frames import Header, RefusedError, view_bytes


@final
@dataclass(frozen=True)
class Rule:
    """Rule for turning gradients into updates.

    Attributes:
        logical_ranks: Number of logical ranks per step.
        synchronous: Whether the mean over all logical ranks of a step is one update. Otherwise each logical rank's
            gradient is an update, with a fraction of the learning rate.
        by_staleness: Whether that fraction is 1 / staleness of the gradient (Zhang et al. 2016, arXiv 1511.05950)
            instead of 1 / logical ranks.
        requires_commit: Whether the update of a step waits for :meth:`Shard.commit_step`.
        finite: Whether NaN and infinite gradients are refused.
    """

    logical_ranks: int
    synchronous: bool = True
    by_staleness: bool = False
    requires_commit: bool = False
    finite: bool = True


@final
class Shard:
    """Updates ``parameters`` according to ``rule``.

    Args:
        parameters: The parameters that this server owns.
        rule: When gradients become an update.
        step: The last completed step.

    Attributes:
        updates: Number of updates since the start of the run.
        last_factor: Gradient factor of the last commit. None if its update was skipped.
    """

    def __init__(self, parameters: ShardParameters, rule: Rule, *, step: int = 0) -> None:
        self.parameters, self.rule, self.step = parameters, rule, step
        self.updates = step if rule.synchronous else step * rule.logical_ranks
        self.last_factor: float | None = 1.0
        buckets, tables = len(parameters.buckets), len(parameters.tables)
        self._gradients = StepGradients(step + 1, logical_ranks=rule.logical_ranks, buckets=buckets, tables=tables)
        self._units = UnitLog(step, logical_ranks=rule.logical_ranks, gradients=parameters.gradients)

    @property
    def closed(self) -> int:
        """The last step up to which all steps are complete."""
        return self.step if self.rule.synchronous else self._units.closed

    def add_gradient(
        self,
        index: int,
        gradient: Gradient,
        *,
        step: int,
        width: int,
        node: int,
        seen: int = 0,
        present: Tensor | None = None,
    ) -> bool:
        """Add the gradient of a bucket or table.

        Args:
            index: Index of the bucket or table; tables follow buckets.
            gradient: For a bucket, a tensor (n,); for a table, unique sorted ids (n,) and values (n, dim).
            step: The step of the gradient.
            width: Number of nodes on one level of the tree over logical ranks, as in
                :class:`~worldsize.collectives.ordered.PartialSums`.
            node: Index of a node on that level; ``gradient`` is its sum. If ``rule.synchronous`` is False, the first
                logical rank of a unit; ``gradient`` is the unit's mean.
            seen: Number of updates included in the worker's weights.
            present: Which pieces of the bucket have a gradient, bool (pieces,). None if all have one.

        Returns:
            Whether it is new; False if the gradient of these logical ranks was added before.

        Raises:
            RefusedError: The gradient is not finite, or is for a step that is not in progress; the shard is unchanged.
        """
        values = gradient if isinstance(gradient, Tensor) else gradient[1]
        if self.rule.finite and not math.isfinite(float(values.sum())):
            raise RefusedError(f"the gradient of step {step} contains NaN or infinity (accepted with nonfinite=ignore)")
        if not self.rule.synchronous:
            return self._push_unit(index, gradient, (step, node), seen, present)
        is_new = self._gradients.add_contribution(index, gradient, step=step, width=width, node=node, present=present)
        if index in self._gradients.means and not self.rule.requires_commit:
            present = self._gradients.present.get(index)
            self.parameters.apply_gradient(index, self._gradients.pop_mean(index), present=present)
            if self._gradients.all_taken:
                self._end_step()
        return is_new

    def _push_unit(
        self, index: int, gradient: Gradient, unit: tuple[int, int], seen: int, present: Tensor | None
    ) -> bool:
        """Apply a unit's gradient at lr / logical ranks, or lr / staleness if configured."""
        if not self._units.record_gradient(unit, index):
            return False
        staleness = max(1, (self.updates - seen + 1) % 2**32)
        share = 1 / (staleness if self.rule.by_staleness else self.rule.logical_ranks)
        self.parameters.apply_gradient(index, gradient, share, present=present)
        if self._units.is_complete(unit):
            self.updates += 1
            if self.updates % self.rule.logical_ranks == 0:
                self.step += 1
                self.parameters.advance_schedule()
            self._units.close_steps()
        return True

    def _end_step(self) -> None:
        self.step += 1
        self.updates += 1
        self.parameters.advance_schedule()
        self._gradients = self._gradients.create_empty(self.step + 1)

    @property
    def waits_for_commit(self) -> bool:
        """Whether the mean gradient of the next step is complete and waits for :meth:`commit_step`."""
        return self.rule.requires_commit and self._gradients.all_wait

    def scale_gradient(self, step: int, factor: float) -> None:
        """Scale the uncommitted mean gradient of ``step`` by ``factor``. Repeated calls are ignored.

        If losses are (sum, weight), this turns the mean of gradients into the gradient of the weighted mean.
        """
        if step == self.step + 1 and self.waits_for_commit:
            self._gradients.scale_means(factor)

    def compute_norms(self) -> dict[str, list[float]]:
        """Return the L2 norms of the uncommitted mean gradient's pieces, by parameter."""
        return self.parameters.compute_piece_norms(self._gradients.means, self._gradients.present)

    def commit_step(self, step: int, factor: float | None) -> None:
        """Commit ``step`` with its gradient scaled by ``factor``; None skips the update."""
        if step != self.step + 1 or not self.waits_for_commit:
            return  # already committed by a request whose answer was lost
        self.last_factor = factor
        for index, gradient in sorted(self._gradients.means.items()):
            if factor not in (None, 1.0):
                (gradient if isinstance(gradient, Tensor) else gradient[1]).mul_(factor)
            if factor is not None:
                self.parameters.apply_gradient(index, gradient, present=self._gradients.present.get(index))
        self._end_step()

    def reset_to_step(self, step: int, factor: float | None) -> None:
        """Prepare for a new leader: complete a committed ``step``, drop later gradients.

        ``factor``: the gradient factor of the commit of ``step``. None if its update was skipped.
        """
        self.commit_step(step, factor)
        if self.rule.synchronous:
            self._gradients = self._gradients.create_empty(self.step + 1)

    def export_image(self) -> dict[str, Any]:
        """Return the complete state for a standby, with pending gradients, without copying."""
        return {
            "parameters": self.parameters.export_parameters(),
            "step": self.step,
            "updates": self.updates,
            "last_factor": self.last_factor,
            "gradients": self._gradients.export_gradients(),
            "units": self._units.export_log(),
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Load an :meth:`export_image` of the master's shard."""
        self.parameters.restore(image["parameters"])
        self.step, self.updates, self.last_factor = image["step"], image["updates"], image["last_factor"]
        self._gradients = self._gradients.create_empty(self.step + 1)
        self._gradients.restore(image["gradients"])
        self._units.restore(**image["units"])

    def state(self) -> dict[str, Any]:
        """Return a copy of the parameters by name, and the number of the last completed step."""
        return {**self.parameters.state(), "step": self.step}


_ID_BYTES, _NUMBER_BYTES = 8, 4


@final
class PushReceiver:
    """Receives pushes to ``shard``, and decodes gradients with ``codec`` (None: no compression)."""

    def __init__(self, shard: Shard, codec: GradientCodec | None) -> None:
        self.shard, self._codec = shard, codec

    def receive_push(self, channel: Channel, header: Header) -> tuple[list[memoryview], Gradient]:
        """Receive the payload of a push; return its bytes and the decoded gradient.

        If pieces of a bucket lack a gradient, presence flags follow the gradient, also in the result; see
        :func:`encode_presence`.

        Raises:
            LostError: The peer has disconnected.
            RefusedError: The bucket or table is not in the shard, or the payload has the wrong size.
        """
        if header.operation == Operation.PUSH_ROWS:
            return self._receive_rows(channel, header)
        table, buckets, codec = Fields._make(header.fields).table, self.shard.parameters.buckets, self._codec
        if table >= len(buckets):
            raise RefusedError(f"unknown table {table} in PUSH; the shard has {len(buckets)} tables")
        bucket = buckets[table]
        dtype, length = (codec.dtype, codec.compute_length(bucket.numel)) if codec else (bucket.dtype, bucket.numel)
        pieces = len(bucket.pieces) if header.shape == (length + len(bucket.pieces),) else 0
        header.require_payload(dtype, (length + pieces,))
        received = torch.empty(length + pieces, dtype=dtype)
        channel.receive_into(payload := [view_bytes(received)])
        if codec is None:
            return payload, received
        gradient_n = codec.decode(received[:length], bucket.numel)
        return payload, torch.cat([gradient_n, received[length:].to(gradient_n.dtype)]) if pieces else gradient_n

    def _receive_rows(self, channel: Channel, header: Header) -> tuple[list[memoryview], Gradient]:
        rows = self._find_rows(header)
        count, rest = divmod(header.length, _ID_BYTES + _NUMBER_BYTES * rows.table.dim)
        if rest or header.dtype != torch.uint8 or count > rows.table.rows:
            raise RefusedError(f"unexpected PUSH_ROWS of {rows.table.name} with {header.length} bytes")
        ids_n, gradients_nd = torch.empty(count, dtype=torch.int64), torch.empty(count, rows.table.dim)
        channel.receive_into(payload := [view_bytes(ids_n), view_bytes(gradients_nd)])
        _check_ids(rows, ids_n)
        return payload, (ids_n, gradients_nd)

    def receive_ids(self, channel: Channel, header: Header) -> tuple[Rows, Tensor]:
        """Receive PULL_ROWS: the table and ids, int64 (n,). Raises like :meth:`receive_push`."""
        rows = self._find_rows(header)
        if header.dtype != torch.int64 or len(header.shape) != 1 or header.shape[0] > rows.table.rows:
            raise RefusedError(f"unexpected PULL_ROWS of {rows.table.name} with {header.dtype} {list(header.shape)}")
        ids_n = torch.empty(header.shape, dtype=torch.int64)
        channel.receive_into([view_bytes(ids_n)])
        _check_ids(rows, ids_n)
        return rows, ids_n

    def _find_rows(self, header: Header) -> Rows:
        table, tables = Fields._make(header.fields).table, self.shard.parameters.tables
        if table >= len(tables):
            raise RefusedError(f"unknown table {table}; the shard has {len(tables)} tables")
        return tables[table]

    def push_gradient(self, header: Header, gradient: Gradient) -> None:
        """Push a received gradient to the shard. Raises RefusedError like :meth:`Shard.add_gradient`."""
        fields = Fields._make(header.fields)
        first = len(self.shard.parameters.buckets) if header.operation == Operation.PUSH_ROWS else 0
        part = {"step": fields.step, "width": fields.width, "node": fields.node, "seen": fields.seen}
        present = None
        if isinstance(gradient, Tensor):
            numel = self.shard.parameters.buckets[fields.table].numel
            present = gradient[numel:] > 0 if len(gradient) > numel else None
            gradient = gradient[:numel]
        self.shard.add_gradient(first + fields.table, gradient, present=present, **part)


def _check_ids(rows: Rows, ids_n: Tensor) -> None:
    """Raise RefusedError unless ``ids_n`` (n,) are sorted, unique and assigned to this server."""
    ids = ids_n.numpy()  # for few rows, NumPy is four times as fast as torch
    if not len(ids):
        return
    if not (ids[1:] > ids[:-1]).all():
        raise RefusedError(f"row ids of {rows.table.name} must be sorted and unique")
    if ids[0] < 0 or ids[-1] >= rows.table.rows:
        raise RefusedError(f"row ids of {rows.table.name} must be between 0 and {rows.table.rows - 1}")
    if rows.rule.shards > 1 and not bool((rows.rule.assign_shards(ids_n, rows.table) == rows.shard).all()):
        raise RefusedError(f"the request contains rows of {rows.table.name} on a different server")
