"""The replica of the server that leads: the training loop's steps are computed by workers and kept by shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from worldsize.collectives.exact import reduce_metrics
from worldsize.collectives.step_timer import phase
from worldsize.core import EvaluationBatch, MicroBatch, Numerics, Replica, StateDict, StepResult, World
from worldsize.strategies.clipping import clip_factor
from worldsize.strategies.parameter_server.client import Dialer
from worldsize.strategies.parameter_server.desk import Desk
from worldsize.strategies.parameter_server.rows import RowRule
from worldsize.strategies.parameter_server.server import Server
from worldsize.strategies.parameter_server.shard import assembled
from worldsize.strategies.parameter_server.tree import receive_tree
from worldsize.strategies.parameter_server.whole import joined_rows, whole_state
from worldsize.strategies.train_state import TrainState
from worldsize.transport.channel import Channel, LostError
from worldsize.transport.frames import Header, Operation, message
from worldsize.transport.registry import Directory

T = TypeVar("T")
Frame = tuple[Header, Sequence[memoryview]]


@final
class Peer:
    """Another shard's master, whoever that is; every request can be asked again if the connection breaks."""

    def __init__(self, dialer: Dialer, shard: int) -> None:
        self._dialer, self._shard = dialer, shard
        self._channel, _ = dialer.connect(shard, "peer")

    def ask(self, frame: Frame, answer: Callable[[Channel], T]) -> T:
        """Send ``frame`` and give what ``answer`` reads."""
        while True:
            try:
                self._channel.send(*frame)
                return answer(self._channel)
            except LostError:
                self._channel.close()
                self._channel, _ = self._dialer.connect(self._shard, "peer")

    def message(self, operation: Operation) -> Any:
        return self.ask((Header(operation), []), lambda channel: channel.message(channel.answer(Operation.MESSAGE)))

    def tell(self, operation: Operation, facts: Any) -> None:
        self.ask(message(operation, facts), lambda channel: channel.answer(Operation.DONE))

    def state(self) -> Any:
        def receive(channel: Channel) -> Any:
            channel.answer(Operation.DONE)
            return receive_tree(channel)

        return self.ask((Header(Operation.STATE), []), receive)


@final
class Coordinator(Replica):
    """``server`` has its own shard, ``peers`` the others; ``learning`` takes up the whole state.

    ``numerics``: what is done about the norm of a step's mean gradient.
    """

    def __init__(
        self,
        server: Server,
        desk: Desk,
        directory: Directory,
        peers: Sequence[Peer],
        learning: TrainState,
        world: World,
        *,
        rows: RowRule,
        numerics: Numerics,
    ) -> None:
        self._server, self._desk, self._directory, self._peers = server, desk, directory, peers
        self._learning, self._world = learning, world
        self._rows, self._numerics = rows, numerics
        self._gathers = server.shard.rule.gathers
        self._pool = ThreadPoolExecutor(max(1, len(peers)), "peer")
        self.step_reached = server.shard.closed
        agreed = (self.step_reached, server.shard.last_factor)
        server.reset(*agreed)
        for peer in peers:
            peer.tell(Operation.RESET, dict(zip(("step", "factor"), agreed, strict=True)))

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """The next step, computed by workers, who draw its data themselves."""
        assert self.step_reached is not None
        step, lr = self.step_reached + 1, self._server.shard.lr
        if self._gathers:
            self._desk.open(step)
        with phase("communication"):
            losses = [torch.tensor(loss) for loss in self._desk.finished(step)]
        with phase("update"):
            norm, skipped = self._approve(step) if self._gathers else (None, False)
        self.step_reached = step
        return StepResult(losses, lr, norm, skipped)

    def _approve(self, step: int) -> tuple[Tensor | None, bool]:
        """Clip the mean gradient by its norm over all shards, or leave the step out if that is not finite."""
        norm, factor = self._judged() if self._numerics.needs_norm else (None, 1.0)
        self._server.apply(step, factor)  # from here on it is decided, also if this server dies
        self._ask(lambda peer: peer.tell(Operation.APPLY, {"step": step, "factor": factor}))
        return norm, factor is None

    def _ask(self, question: Callable[[Peer], T]) -> list[T]:
        """All peers at once."""
        return list(self._pool.map(question, self._peers))

    def _judged(self) -> tuple[Tensor, float | None]:
        """The norm, and what the gradient is to be multiplied by."""
        norm = torch.linalg.vector_norm(torch.stack(self._norms()))
        if self._numerics.skips(norm):
            return norm, None
        return norm, float(clip_factor(norm, self._numerics.norm_limit))

    def _norms(self) -> list[Tensor]:
        """Of each parameter's gradient, in the order of the model."""
        found = self._server.shard.norms()
        for others in self._ask(lambda peer: peer.message(Operation.NORMS)):
            for name, norms in others.items():
                found.setdefault(name, []).extend(norms)
        names = [name for name, _ in self._learning.model.named_parameters() if name in found]
        pieces = [torch.tensor(found[name]) for name in names]
        return [torch.linalg.vector_norm(norms) if norms.numel() > 1 else norms[0] for norms in pieces]

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        """By the workers, who draw the batches themselves."""
        sums, names = self._desk.evaluate(max(1, len(self._desk.workers)) if self._gathers else 1)
        return reduce_metrics(sums, names, self._world)

    def state(self) -> StateDict:
        """Of all shards together."""
        states = [self._server.state(), *self._ask(Peer.state)]
        assembled(states, self._learning)
        return whole_state(self._learning, joined_rows([state["tables"] for state in states]), self._rows)

    def load(self, state: StateDict) -> None:
        """Nothing: each server has loaded its part by itself."""

    def facts(self) -> Mapping[str, Any]:
        """Load of each server since the last call, and the workers."""
        servers = [self._server.facts(), *self._ask(lambda peer: peer.message(Operation.FACTS))]
        return {"servers": servers, "workers": len(self._desk.workers)}

    def close(self, *, complete: bool) -> None:
        self._directory.end()
        self._desk.end("the run is complete" if complete else "the run pauses")
        self._server.ended.set()
        for peer in self._peers:
            peer.tell(Operation.STOP, {})
