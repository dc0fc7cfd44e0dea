"""A worker: takes tasks, computes gradients, pushes them, pulls weights. It knows no other worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.collectives.ordered import Arrivals
from worldsize.core import Recipe, RunContext
from worldsize.reproducibility.seeds import seed_generators
from worldsize.strategies.clipping import clip_factor
from worldsize.strategies.gradient_reducer import taken
from worldsize.strategies.parameter_server.gradient_codecs import Feedback
from worldsize.strategies.parameter_server.operations import Operation, shard_service
from worldsize.strategies.parameter_server.overlapped_push import Overlap, Place
from worldsize.strategies.parameter_server.remote_embedding import TableLinks, remote_model
from worldsize.strategies.parameter_server.shard_link import ShardLink
from worldsize.strategies.parameter_server.sharding import Bucket, ShardingPlan
from worldsize.strategies.parameter_server.worker_heartbeat import WorkerHeartbeat
from worldsize.strategies.synchronous import autocast, metric_sums
from worldsize.transport.channel import Channel, LostError
from worldsize.transport.dialer import Dialer
from worldsize.transport.frames import view
from worldsize.transport.registry import EndedError

_OVERLAPPED = 1 << 20  # bytes of gradients; fewer are sent before a thread has begun


@final
@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker: how it computes gradients and reads weights.

    Attributes:
        synchronous: A step's gradients are summed before they are an update.
        staleness: Steps that what the worker reads may be behind.
        cache_rows: Rows of each table that the worker keeps, and reads again within the staleness.
    """

    synchronous: bool
    staleness: int = 0
    cache_rows: int = 0


@final
class Worker:
    """Works for one run, from its first task to its last.

    Args:
        recipe: What is trained.
        context: Of the run: this process's rank, data, numerics, and whether to stop.
        dialer: Connects to the servers.
        plan: What is whose.
        options: How gradients are computed and weights are read.
    """

    def __init__(
        self,
        recipe: Recipe,
        context: RunContext,
        dialer: Dialer,
        plan: ShardingPlan,
        options: WorkerOptions,
    ) -> None:
        world, shards = context.world, plan.shards
        self._recipe, self._world, self._context, self._dialer = recipe, world, context, dialer
        self._numerics, self._synchronous, self._shards = context.numerics, options.synchronous, shards
        self._model = remote_model(recipe).to(world.device)
        self._staleness = options.staleness
        self._tables = TableLinks(self._model, plan.rows, cache_rows=options.cache_rows)
        self._codec, self._feedback = plan.codec, Feedback(plan.codec) if plan.codec else None
        # each worker begins with another server, so that they do not all wait for the same link
        self._order = [(world.rank + turn) % len(shards) for turn in range(len(shards))]
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        nbytes = sum(parameter.nbytes for parameter in self._parameters.values())
        self._overlap = Overlap(self._parameters, shards) if nbytes >= _OVERLAPPED else None
        self._memory = [[(b.dtype, self._pieces(b, self._parameters)) for b in shard] for shard in shards]

    def _pieces(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> list[memoryview]:
        return [view(piece.of(tensors[piece.name])) for piece in bucket.pieces]

    def run(self, lease: float) -> None:
        """Work until the server that leads says that it is enough; comes back to it if the connection is lost."""
        heartbeat = WorkerHeartbeat(self._dialer, lease)
        with suppress(EndedError):
            while not self._joined():
                print("joins again", flush=True)
        heartbeat.stop()

    def _joined(self) -> bool:
        """Work as a member; False if the server that leads is gone, or has given this worker up."""
        control, facts = self._dialer.connect(shard_service(0), "control")
        links = [ShardLink(self._dialer, shard, facts["epoch"]) for shard in range(len(self._shards))]
        self._tables.connect(links)
        try:
            return self._work(control, links)
        except LostError:
            return False
        finally:
            control.close()
            for link in links:
                link.close()

    def _work(self, control: Channel, links: Sequence[ShardLink]) -> bool:
        """Do task after task until the run ends; False: this worker is no member any more."""
        todo: Mapping[str, Callable[[Mapping[str, Any], Sequence[ShardLink]], dict[str, Any]]] = {
            "train": self._train,
            "evaluate": self._evaluate,
        }
        done: dict[str, Any] = {}
        while True:
            control.send_message(Operation.TICK, {**done, "leaves": self._context.stop.is_wanted()})
            task = control.message(control.answer(Operation.TASK))
            if task["do"] == "stop":
                print(f"ends: {task['why']}", *self._tables.cache_facts(), sep="; ", flush=True)
                return True
            if task["do"] == "join":
                return False
            done = todo[task["do"]](task, links)

    def _train(self, task: Mapping[str, Any], links: Sequence[ShardLink]) -> dict[str, Any]:
        step, ranks = task["step"], task["ranks"]
        batches = [self._context.data.micro_batch(step, rank) for rank in ranks]
        with self._context.timing.measured(step):
            losses = self._learned(batches, links, step, ranks)
        return {"unit": [step, ranks], "losses": [float(loss) for loss in losses]}

    def _learned(
        self, batches: Sequence[Any], links: Sequence[ShardLink], step: int, ranks: Sequence[int]
    ) -> list[Tensor]:
        """Pull weights, compute gradients and push them; give the losses."""
        self._pull(links, step - 1 if self._synchronous else 0)
        self._tables.oldest = step - 1 - self._staleness
        if self._overlap and len(ranks) == 1 and (self._synchronous or self._numerics.clip_norm is None):
            losses = [self._overlapped(self._overlap, batches[0], links, step, ranks[0])]
        else:
            losses = self._summed(batches, links, step, ranks)
        for link in links:
            link.settle()
        return losses

    def _summed(
        self, batches: Sequence[Any], links: Sequence[ShardLink], step: int, ranks: Sequence[int]
    ) -> list[Tensor]:
        """Push gradients when those of all backward passes have been added up; give the losses."""
        total, arrivals, losses, touched = self._context.logical_ranks, Arrivals(self._context.logical_ranks), [], []
        for rank, batch in zip(ranks, batches, strict=True):
            losses.append(self._backward(batch))
            arrivals.add(total, rank, taken(self._parameters.values()))
            touched.append(self._tables.take())
        if not self._synchronous:
            self._clip([*arrivals.parts[total, ranks[0]], *(values for _, values in touched[0])])
        for (width, node), gradients in arrivals.parts.items():
            self._push(links, dict(zip(self._parameters, gradients, strict=True)), step, width, node)
        for rank, rows in zip(ranks, touched, strict=True):
            self._tables.push(rows, step=step, width=total, node=rank)
        return losses

    def _overlapped(self, overlap: Overlap, batch: Any, links: Sequence[ShardLink], step: int, rank: int) -> Tensor:
        """Push gradients during the one backward pass; give the loss."""
        part = {"step": step, "width": self._context.logical_ranks, "node": rank}
        overlap.begin(lambda place, gradients: self._send(links, place, gradients, part))
        loss = self._backward(batch)
        overlap.finish()
        taken(self._parameters.values())
        self._tables.push(self._tables.take(), **part)
        return loss

    def _backward(self, batch: Any) -> Tensor:
        seed_generators(batch.seed, self._world.device)
        with autocast(self._world.device, self._numerics.precision):
            loss = self._recipe.loss(self._model, batch.data)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        """Clip a unit's gradient by its own norm, as is done where steps overlap."""
        if self._numerics.clip_norm is not None:
            norm = nn.utils.get_total_norm(gradients)
            torch._foreach_mul_(list(gradients), clip_factor(norm, self._numerics.clip_norm))

    def _push(
        self, links: Sequence[ShardLink], gradients: Mapping[str, Tensor], step: int, width: int, node: int
    ) -> None:
        for turn, server in enumerate(self._order):
            self._context.faults.at("push:next-server" if turn else "push:begin")
            for table in range(len(self._shards[server])):
                self._send(links, (server, table), gradients, {"step": step, "width": width, "node": node})

    def _send(
        self, links: Sequence[ShardLink], place: Place, gradients: Mapping[str, Tensor], part: Mapping[str, int]
    ) -> None:
        server, table = place
        bucket = self._shards[server][table]
        pieces = [piece.of(gradients[piece.name]).cpu().contiguous() for piece in bucket.pieces]
        dtype, payload = self._encoded(bucket, pieces)
        links[server].push(table, dtype, payload, **part)

    def _encoded(self, bucket: Bucket, pieces: Sequence[Tensor]) -> tuple[torch.dtype, list[memoryview]]:
        if self._codec is None or self._feedback is None:
            return bucket.dtype, [view(piece) for piece in pieces]
        flat_n = torch.cat([piece.flatten() for piece in pieces])
        return self._codec.dtype, [view(self._feedback.encode(bucket, flat_n))]

    def _pull(self, links: Sequence[ShardLink], step: int) -> None:
        self._tables.step = step
        for link in links:
            link.ask(step)
        for server in self._order:
            links[server].receive(self._memory[server])

    def _evaluate(self, task: Mapping[str, Any], links: Sequence[ShardLink]) -> dict[str, Any]:
        self._pull(links, 0)
        self._tables.oldest = None
        batches = self._context.data.evaluation(task["part"], task["parts"])
        with autocast(self._world.device, self._numerics.precision):
            sums, names = metric_sums(self._recipe, self._model, batches)
        sums_by_index = {i: {name: [float(a), float(b)] for name, (a, b) in each.items()} for i, each in sums.items()}
        return {"part": task["part"], "sums": sums_by_index, "names": names}
