"""Strategy with tables on servers and all-reduce for all else (PERSIA, Lian et al. 2022, arXiv 2111.05897)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plugins.parameter_server.protocol import Operation, Peer, Peers
from plugins.parameter_server.remote_embedding import build_linked_model, find_remote_tables, take_gradients
from plugins.parameter_server.row_store import Sharding, check_rows
from plugins.parameter_server.row_tables import RowGradients, RowRule
from plugins.parameter_server.server_group import ServerGroup, Transport, add_tables, create_train_state, join_rows
from plugins.parameter_server.shard import Rule
from plugins.parameter_server.shard_link import ShardLink
from plugins.parameter_server.sharding import ShardingPlan
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import (
    Cluster,
    ConfigError,
    EvaluationBatch,
    MicroBatch,
    Numerics,
    Range,
    Recipe,
    Replica,
    Role,
    RunContext,
    StateDict,
    StepResult,
    Strategy,
)
from worldsize.core.limits import SECONDS
from worldsize.net.registry import Dialer
from worldsize.strategies.gradient_reducer import Backward, GradientReducer, clip_factor
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.reducers import gradient_reducer
from worldsize.strategies.step_hooks import recipe_hooks, refuse_hooks_on
from worldsize.strategies.synchronous import SynchronousReplica, wrap_in_ddp
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.wrapping import sparse_embeddings


@final
@dataclass(frozen=True)
class HybridParameterServer(Strategy):
    """DDP for dense parameters; ``servers`` store the rows of embeddings with ``sparse=True``.

    ``consistency``: with "sync", rows are updated with the mean gradient over all workers before the next step reads
    them. With "async", they are updated with each worker's gradient as it arrives. ``find_unused_parameters`` is passed
    to DDP. See ParameterServer for the other options.
    """

    supports = frozenset({"state_metrics", "loss_scale", "activation_checkpointing"})
    serves_rows: ClassVar[bool] = True
    servers: int = 1
    consistency: Literal["sync", "async"] = "sync"
    find_unused_parameters: bool = False
    lease: Annotated[float, SECONDS] = 5.0
    transport: Transport = "auto"
    host: str | None = None
    nodes: int = 1
    seed: int = 0
    sharding: Sharding = "hash"
    admit_after: Annotated[int, Range(least=0)] = 0
    capacity: Annotated[int | None, Range(least=1)] = None

    def check_numerics(self, numerics: Numerics) -> None:
        if numerics.needs_norm and (self.consistency == "async" or self.reduce == "ordered"):
            raise ConfigError(
                "clip_norm and nonfinite=skip require strategy.consistency=sync and are not supported with "
                "reproducibility=elastic. Set clip_norm=null and nonfinite=stop, or use strategy.consistency=sync "
                "without reproducibility=elastic."
            )

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        tables = {f"{name}.weight": embedding.weight for name, embedding in sparse_embeddings(model).items()}
        if tables and recipe_hooks(optimizer):
            refuse_hooks_on(tables, recipe, model)
        check_rows(model, optimizer)

    @property
    def _group(self) -> ServerGroup:
        return ServerGroup(self.servers, 0, self.lease, self.transport, self.host, self.nodes)

    @property
    def _rows(self) -> RowRule:
        return RowRule(self.seed, self.servers, self.sharding, self.admit_after, self.capacity)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        workers = cluster.processes - self.servers
        self._group.check_cluster(cluster, workers)
        return {"server": Role(self.servers, serves=True), "worker": Role(workers)}

    def prepare(self, folder: Any) -> None:
        self._group.prepare_keys(folder)

    def serve(self, recipe: Recipe, context: RunContext) -> None:
        synchronous = self.consistency == "sync"
        numerics = context.numerics
        finite = numerics.nonfinite == "stop"
        rule = Rule(context.logical_ranks, synchronous=synchronous, requires_commit=numerics.needs_norm, finite=finite)
        plan = ShardingPlan([()] * self.servers, self._rows)
        pending = self._group.create_server(recipe, create_train_state(recipe), context, plan=plan, rule=rule)
        pending.succession.run()
        pending.serve(leader_prefix="worker-").master.log.ended.wait()

    @property
    def schedules_by_metric(self) -> bool:
        return self.consistency == "sync"

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        dialer = self._group.create_dialer(f"worker-{context.world.rank}", context)
        return _HybridReplica(self, recipe, context, dialer, self._rows)


@final
class RowGradientCapture(GradientReducer):
    """Wraps a gradient reducer, and collects row gradients separately after each backward pass.

    Args:
        inner: Reduces the dense gradients.
        take: Returns the row gradients since the last call.
        rows_norm: Returns the norm of the step's row gradients on the servers, a scalar; they then wait for
            ``approve``.
        approve: Commits the step on the servers, given the total norm and the clipping factor, two scalars.
    """

    def __init__(
        self,
        inner: GradientReducer,
        take: Callable[[], list[RowGradients]],
        rows_norm: Callable[[], Tensor],
        approve: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._inner, self._take, self._rows_norm, self._approve = inner, take, rows_norm, approve
        self.captured: dict[int, list[RowGradients]] = {}

    @property
    def is_ordered(self) -> bool:
        return self._inner.is_ordered

    def on_resume(self) -> None:
        self._inner.on_resume()

    def scale(self, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
        self._inner.scale(parameters, factor)
        for gradients in self.captured.values():
            for _, values_nd in gradients:
                values_nd.mul_(factor)

    def compute_norm(self, parameters: Sequence[nn.Parameter]) -> None:
        """Return None: without clipping, the servers do not wait for the norm of all rows."""

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clip by the norm of all gradients, including rows; return it like ``clip_grad_norm_``."""
        dense = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rows_norm = self._rows_norm()
        norms = [rows_norm, nn.utils.get_total_norm(dense).to(rows_norm.device)] if dense else [rows_norm]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        scale = clip_factor(norm, limit)
        if dense:
            torch._foreach_mul_(dense, scale)
        self._approve(norm, scale)
        return norm

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        numbers = {id(batch): number for number, batch in enumerate(batches)}

        def run_backward(batch: MicroBatch, scale: float) -> LossRecord:
            loss = backward(batch, scale)
            self.captured[numbers[id(batch)]] = [(ids_n, values_nd.div_(scale)) for ids_n, values_nd in self._take()]
            return loss

        return self._inner.run(batches, run_backward)


@final
class _HybridReplica(Replica):
    """A synchronous replica of the dense parameters, and connections to the servers of rows."""

    def __init__(
        self, strategy: HybridParameterServer, recipe: Recipe, context: RunContext, dialer: Dialer, rule: RowRule
    ) -> None:
        world = context.world
        self._world, self._dialer, self._rule = world, dialer, rule
        self._synchronous = strategy.consistency == "sync"
        model, self._tables = build_linked_model(recipe, rule)
        model.to(world.device)
        self._tables.replace_table_links(
            [ShardLink(dialer, shard, time.time_ns()) for shard in range(strategy.servers)]
        )
        module = self._wrap_model(model, find_unused_parameters=strategy.find_unused_parameters)
        sums = gradient_reducer(strategy.reduce, module or model, world.group)
        self._capture = RowGradientCapture(
            sums, partial(take_gradients, list(find_remote_tables(model))), self._rows_norm, self._commit_step
        )
        self._inner = SynchronousReplica(
            recipe,
            context,
            train_state=TrainState.from_recipe(recipe, model),
            reducer=self._capture,
            module=module,
        )
        self._step = self._tables.links[0].step

    def _wrap_model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module | None:
        dense = any(parameter.requires_grad for parameter in model.parameters())
        if self._world.size == 1 or not dense:
            return None
        return wrap_in_ddp(model, self._world, find_unused_parameters=find_unused_parameters)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self._tables.step = self._step if self._synchronous else 0
        self._step += 1
        result = self._inner.step(micro_batches)
        self._push_rows()
        return result

    def _push_rows(self) -> None:
        width = len(self._capture.captured) * self._world.size
        for number, gradients in sorted(self._capture.captured.items()):
            rank = number * self._world.size + self._world.rank  # strided, like the data
            self._tables.push_row_gradients(
                gradients, step=self._step, width=width, node=rank
            )  # the next pull reads the acknowledgment
        self._capture.captured.clear()

    def _rows_norm(self) -> Tensor:
        """Push the rows of this step; return the norm of their mean gradient, a scalar, on all ranks."""
        self._push_rows()
        norm = torch.zeros((), device=self._world.device)
        if self._world.rank == 0:
            with measure_phase("communication"):
                answers = self._peers.request_messages(Operation.NORMS)
            norm += torch.linalg.vector_norm(
                torch.tensor([n for norms_of in answers for norms in norms_of.values() for n in norms])
            )
        if self._world.group is not None and self._world.size > 1:
            torch.distributed.broadcast(norm, group=self._world.group, group_src=0)
        return norm

    def _commit_step(self, norm: Tensor, factor: Tensor) -> None:
        """Commit the step on the servers, or skip it if the dense parameters skip it."""
        skipped = self._inner.numerics.should_skip_update(norm)
        if self._world.rank == 0:
            decision = {"step": self._step, "factor": None if skipped else float(factor)}
            with measure_phase("communication"):
                self._peers.send_commands(Operation.APPLY, decision)

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        self._tables.step = self._step if self._synchronous else 0
        return self._inner.evaluate(batches)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)
        self._wait_for_pushes()  # so that rows of this step are updated with the old learning rate
        if self._world.rank == 0:
            self._peers.send_commands(Operation.ADVANCE, {"value": value, "step": step})
        if self._world.group is not None:
            torch.distributed.barrier(self._world.group)  # so that later rows are updated with the new one

    def facts(self) -> Mapping[str, Any]:
        """Return the load of each server, on rank 0 only."""
        if self._world.rank:
            return {}
        return {"servers": self._peers.request_messages(Operation.FACTS)}

    def state(self) -> StateDict:
        """Fetch all rows on all workers, since each saves a shard of the state."""
        self._wait_for_pushes()
        states = [state["tables"] for state in self._peers.call_peers(Peer.request_state)]
        return add_tables(self._inner.state(), self._inner.model, join_rows(states), self._rule)

    def _wait_for_pushes(self) -> None:
        """Wait until the servers have acknowledged the pushes of all workers."""
        for link in self._tables.links:
            link.wait_for_pushes()
        if self._world.group is not None:
            torch.distributed.barrier(self._world.group)

    @cached_property
    def _peers(self) -> Peers:
        return Peers(self._dialer, range(len(self._tables.links)))

    def load(self, state: StateDict) -> None:
        """Load the dense parameters; servers load their rows themselves."""
        empty = {name: tensor for name, tensor in self._inner.model.state_dict().items() if not tensor.numel()}
        self._inner.load({**state, "model": {**state["model"], **empty}})
        self._step = self._tables.links[0].step

    def close(self, *, complete: bool) -> None:
        self._wait_for_pushes()
        for link in self._tables.links:
            link.close()
        if self._world.rank == 0:
            self._dialer.registry.mark_ended()
            self._peers.send_commands(Operation.STOP, {})
