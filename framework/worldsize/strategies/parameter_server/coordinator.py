"""The replica of the server that leads: the training loop's steps are computed by workers and kept by shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from worldsize.collectives.exact import reduce_metrics
from worldsize.core import EvaluationBatch, MicroBatch, Replica, StateDict, StepResult, World
from worldsize.strategies.learning import Learning
from worldsize.strategies.parameter_server.channel import Channel
from worldsize.strategies.parameter_server.desk import Desk
from worldsize.strategies.parameter_server.directory import Directory
from worldsize.strategies.parameter_server.frames import Header, Operation
from worldsize.strategies.parameter_server.server import Server
from worldsize.strategies.parameter_server.shard import assembled
from worldsize.strategies.parameter_server.tree import receive_tree

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@final
class Coordinator(Replica):
    """``server`` is its own shard, ``peers`` are channels to the others; ``learning`` takes up the whole state."""

    def __init__(
        self,
        server: Server,
        desk: Desk,
        directory: Directory,
        peers: Sequence[Channel],
        learning: Learning,
        world: World,
        *,
        clip_norm: float | None,
        skips: bool,
    ) -> None:
        self._server, self._desk, self._directory, self._peers = server, desk, directory, peers
        self._learning, self._world = learning, world
        self._clip_norm, self._skips = clip_norm, skips
        self._gathers = server.shard.rule.gathers
        self.step_reached = server.shard.step

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """The next step, computed by workers, who draw its data themselves."""
        assert self.step_reached is not None
        step, lr = self.step_reached + 1, self._server.shard.lr
        if self._gathers:
            self._desk.open(step)
        losses = [torch.tensor(loss) for loss in self._desk.finished(step)]
        norm, skipped = self._approve(step) if self._server.shard.rule.approves else (None, False)
        self.step_reached = step
        return StepResult(losses, lr, norm, skipped)

    def _approve(self, step: int) -> tuple[Tensor, bool]:
        """Clip the mean gradient by its norm over all shards, or leave the step out if that is not finite."""
        norm = torch.linalg.vector_norm(torch.stack(self._norms()))
        skipped = self._skips and not bool(norm.isfinite())
        limit = self._clip_norm if self._clip_norm is not None else float("inf")
        factor = None if skipped else float(torch.clamp(limit / (norm + _TINY), max=1.0))
        for peer in self._peers:
            peer.tell(Operation.APPLY, {"step": step, "factor": factor})
        with self._server.changed:
            self._server.shard.apply(step, factor)
            self._server.changed.notify_all()
        for peer in self._peers:
            peer.answer(Operation.DONE)
        return norm, skipped

    def _norms(self) -> list[Tensor]:
        """Of each parameter's gradient, in the order of the model."""
        for peer in self._peers:
            peer.send(Header(Operation.NORMS))
        found = self._server.shard.norms()
        for peer in self._peers:
            for name, norms in peer.message(peer.answer(Operation.MESSAGE)).items():
                found.setdefault(name, []).extend(norms)
        pieces = [torch.tensor(found[name]) for name, _ in self._learning.model.named_parameters() if name in found]
        return [torch.linalg.vector_norm(norms) if norms.numel() > 1 else norms[0] for norms in pieces]

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        """By the workers, who draw the batches themselves."""
        sums, names = self._desk.evaluate(max(1, len(self._desk.workers)) if self._gathers else 1)
        return reduce_metrics(sums, names, self._world)

    def state(self) -> StateDict:
        """Of all shards together; workers go on as soon as each shard has copied its part."""
        for peer in self._peers:
            peer.send(Header(Operation.STATE))
        with self._server.changed:
            states: list[Any] = [self._server.shard.state()]
        for peer in self._peers:
            peer.answer(Operation.DONE)
        states += [receive_tree(peer) for peer in self._peers]
        assembled(states, self._learning)
        return {**self._learning.state(), "scaler": {}}

    def load(self, state: StateDict) -> None:
        """Nothing: each server has loaded its part by itself."""

    def close(self, *, complete: bool) -> None:
        self._directory.end()
        self._desk.end("the run is complete" if complete else "the run pauses")
        for peer in self._peers:
            peer.send(Header(Operation.STOP))
            peer.answer(Operation.DONE)
