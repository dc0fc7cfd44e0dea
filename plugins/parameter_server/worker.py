"""A worker: executes tasks, computes and pushes gradients, and pulls weights.

Buckets are pushed while the backward pass is still computing others (Zhang et al. 2017, Poseidon, arXiv 1706.03292).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor, nn

from plugins.parameter_server.remote_embedding import TableLinks, find_remote_tables, take_gradients
from plugins.parameter_server.shard_link import DenseLinks, ShardLink
from plugins.parameter_server.sharding import BucketKey, ShardingPlan, ShardLayout
from plugins.parameter_server.task_loop import TaskLoop, UnownedWeights, create_worker_watch, evaluate_part
from worldsize.collectives.ordered import PartialSums
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import LossOutput, Recipe, RunContext
from worldsize.net.registry import Dialer
from worldsize.strategies.gradient_reducer import Presence, clip_factor, pop_gradients
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.loss_record import LossRecord, mean_loss, trainable
from worldsize.strategies.model_passes import prepare_passes
from worldsize.strategies.model_replica import autocast
from worldsize.strategies.parameter_changes import ParameterChanges

_OVERLAPPED = 1 << 20  # bytes of gradients below which sending takes less time than starting a thread


@final
@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker: how it computes gradients and reads weights.

    Attributes:
        synchronous: Whether the gradients of a step are combined into one update.
        staleness: Number of steps that the worker's weights may be behind.
        ordered: Whether sums over logical ranks have a fixed order.
    """

    synchronous: bool
    staleness: int = 0
    ordered: bool = False


@final
class Worker:
    """A worker's part in one run, from the first task to the last.

    Args:
        recipe: The recipe to train.
        context: The context of the run: rank, data, numerics, and stop flag.
        dialer: Connects to the servers.
        plan: The assignment of parameters to servers.
        options: How gradients are computed and weights are read.
        model: The recipe's model, with its tables on servers.
        tables: The links for reading rows; see :func:`build_linked_model`.
    """

    def __init__(
        self,
        recipe: Recipe,
        context: RunContext,
        dialer: Dialer,
        plan: ShardingPlan,
        options: WorkerOptions,
        *,
        model: nn.Module,
        tables: TableLinks,
    ) -> None:
        self._tables = tables
        self._recipe, self._context, self._dialer, self._options = recipe, context, dialer, options
        self._model = model.to(context.world.device)
        prepare_passes(recipe, self._model, context.numerics, context.world.device)
        self._streams = LayerStreams(recipe, self._model, context.world.device, by_layer=options.ordered)
        self._remotes = list(find_remote_tables(self._model))
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._unowned = UnownedWeights(self._model)
        self._watch = create_worker_watch(self._model, context)
        self._dense = DenseLinks(self._parameters, plan, first=context.world.rank, faults=context.faults)
        nbytes = sum(parameter.nbytes for parameter in self._parameters.values())
        self._overlap = OverlappedPush(self._parameters, plan.shards) if nbytes >= _OVERLAPPED else None
        self._changes = ParameterChanges(self._model, hooks=True)

    def run(self, lease: float) -> None:
        """Work until the run ends. The leader retires workers after ``lease`` seconds of silence."""
        TaskLoop(
            self._dialer,
            self._context.stop,
            shards=self._dense.servers,
            connect=self._connect_servers,
            acts={"train": self._train_unit, "evaluate": self._evaluate},
            last_words=self._tables.cache_facts,
        ).run(lease)

    def _connect_servers(self, links: Sequence[ShardLink]) -> None:
        self._dense.replace_dense_links(links)
        self._tables.replace_table_links(links)

    def _train_unit(self, task: Mapping[str, Any]) -> dict[str, Any]:
        step, ranks = task["step"], task["ranks"]
        batches = [self._context.data.micro_batch(step, rank) for rank in ranks]
        with self._context.timing.measured(step):
            records = self._compute_and_push(batches, step, ranks)
            self._dense.wait_for_all_pushes()
        self._context.faults.report_point("push:end")  # servers have the gradients, but the leader lacks the report
        self._watch.end_step()
        return {"unit": [step, ranks], "records": [record.to_message() for record in records]}

    def _compute_and_push(self, batches: Sequence[Any], step: int, ranks: Sequence[int]) -> list[LossRecord]:
        """Pull weights, compute and push gradients; return the loss records."""
        synchronous = self._options.synchronous
        self._pull_weights(step - 1 if synchronous else 0)
        self._tables.oldest = step - 1 - self._options.staleness
        if self._overlap and len(ranks) == 1 and (synchronous or self._context.numerics.clip_norm is None):
            return [self._push_during_backward(self._overlap, batches[0], step, ranks[0])]
        return self._push_after_backward(batches, step, ranks)

    def _push_after_backward(self, batches: Sequence[Any], step: int, ranks: Sequence[int]) -> list[LossRecord]:
        """Push the summed gradients after all backward passes; return the loss records."""
        total, arrivals, losses, touched = self._context.logical_ranks, PartialSums(self._context.logical_ranks), [], []
        presence = Presence(list(self._parameters.values()))
        for rank, batch in zip(ranks, batches, strict=True):
            losses.append(self._backward(batch))
            presence.record_gradients()
            arrivals.add(total, rank, pop_gradients(self._parameters.values()))
            touched.append(take_gradients(self._remotes))
        if not self._options.synchronous:
            self._clip_gradient([*arrivals.parts[total, ranks[0]], *(values for _, values in touched[0])])
        for (width, node), gradients in arrivals.parts.items():
            named = dict(zip(self._parameters, presence.mask_absent(gradients), strict=True))
            self._dense.push_buckets(named, step=step, width=width, node=node)
        for rank, rows in zip(ranks, touched, strict=True):
            self._tables.push_row_gradients(rows, step=step, width=total, node=rank)
        return losses

    def _push_during_backward(self, overlap: OverlappedPush, batch: Any, step: int, rank: int) -> LossRecord:
        """Push gradients during a single backward pass; return the loss record."""
        part = {"step": step, "width": self._context.logical_ranks, "node": rank}
        try:
            with overlap.during_backward(lambda key, gradients: self._dense.push_bucket(key, gradients, part)):
                loss = self._backward(batch)
        finally:  # otherwise gradients of a failed pass would be added to the next pass
            pop_gradients(self._parameters.values())
            touched = take_gradients(self._remotes)
        self._tables.push_row_gradients(touched, **part)
        return loss

    def _backward(self, batch: Any) -> LossRecord:
        device = self._context.world.device
        self._streams.begin(batch.seed)
        with autocast(device, self._context.numerics.precision), self._watch.watching():
            output = LossOutput.from_loss(self._recipe.micro_batch_loss(self._model, batch))
        total, record = trainable(output)
        if not self._options.synchronous:  # a synchronous step divides by its total weight later
            total, record = trainable(replace(output, loss=mean_loss(output)))
        self._changes.check()  # before any gradient is pushed
        self._unowned.check_unchanged()
        total.backward()  # type: ignore[no-untyped-call]
        return record

    def _clip_gradient(self, gradients: Sequence[Tensor]) -> None:
        """Clip the gradient of a unit by its own norm; used if steps overlap."""
        limit = self._context.numerics.clip_norm
        if limit is not None:
            norm = nn.utils.get_total_norm(gradients)
            torch._foreach_mul_(list(gradients), clip_factor(norm, limit))

    def _pull_weights(self, step: int) -> None:
        self._tables.step = step
        self._dense.pull_weights(step)

    def _evaluate(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self._pull_weights(0)
        self._tables.oldest = None
        return evaluate_part(self._recipe, self._model, self._context, task, self._streams)


Push = Callable[[BucketKey, Mapping[str, Tensor | None]], None]  # a bucket, and its gradients by parameter name


@final
class OverlappedPush:
    """Pushes buckets from a separate thread, each as soon as all its gradients are ready."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], shards: Sequence[ShardLayout]) -> None:
        self._parameters = parameters
        self._names: dict[BucketKey, set[str]] = {
            (server, table): {piece.name for piece in bucket.pieces}
            for server, shard in enumerate(shards)
            for table, bucket in enumerate(shard)
        }
        self._buckets = {name: [key for key, names in self._names.items() if name in names] for name in parameters}
        self._missing: dict[BucketKey, set[str]] = {}
        self._queue: SimpleQueue[BucketKey | None] = SimpleQueue()  # for the backward pass in progress
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._queue_ready_buckets, name))  # type: ignore[no-untyped-call]

    @contextmanager
    def during_backward(self, push: Push) -> Iterator[None]:
        """Push each bucket during the backward pass in this block; at the end, push incomplete buckets.

        Within the context, nothing else may use the connections of ``push``. Exceptions in ``push`` are raised at its
        end. Nothing is pushed after the context, even if it fails.
        """
        self._missing = {key: set(names) for key, names in self._names.items()}
        queue = self._queue = SimpleQueue()  # a new queue: after a failed pass, the old one may contain buckets
        errors: list[Exception] = []
        thread = threading.Thread(target=self._push_buckets, args=(push, queue, errors), daemon=True, name="push")
        thread.start()
        try:
            yield
            for key in list(self._missing):
                queue.put(key)
        finally:
            self._missing = {}
            queue.put(None)
            with measure_phase("communication"):
                thread.join()
        if errors:
            raise errors[0]

    def _queue_ready_buckets(self, name: str, _: Tensor) -> None:
        for key in self._buckets[name]:
            names = self._missing.get(key, set())
            if name in names:
                names.remove(name)
                if not names:
                    del self._missing[key]
                    self._queue.put(key)

    def _push_buckets(self, push: Push, queue: SimpleQueue[BucketKey | None], errors: list[Exception]) -> None:
        try:
            while (key := queue.get()) is not None:
                push(key, {name: self._parameters[name].grad for name in self._names[key]})
        except Exception as error:  # re-raised at the end of the context
            errors.append(error)
