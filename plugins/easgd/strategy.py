"""Elastic averaging SGD: independent workers, each attracted to a center variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

from torch import nn
from torch.optim import Optimizer

from plugins.easgd.centre import Centre, Link, Operation, accept_workers
from plugins.easgd.replica import ElasticReplica
from worldsize.collectives.cluster_cost import (
    estimate_leaving_bytes,
    estimate_push_bytes,
    estimate_push_seconds,
    whole_bytes,
)
from worldsize.core import Cluster, ConfigError, Cost, Range, Recipe, Replica, Role, RunContext, Strategy, Workload
from worldsize.net.credentials import Credentials, create_authority, issue_certificate
from worldsize.net.endpoints import get_listener_address, open_listener
from worldsize.net.registry import Dialer, Registry
from worldsize.record.run_directory import create_private_folder
from worldsize.strategies.periodic import find_trained_parameters
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.wrapping import refuse_complex

_SERVICE, _CENTRE = "centre", "centre-0"
Rounds = Literal["synchronous", "asynchronous"]


@final
@dataclass(frozen=True)
class EASGD(Strategy):
    """Elastic averaging SGD (Zhang, Choromanska & LeCun 2015, arXiv 1412.6651).

    Every ``period`` steps, a worker moves toward the center by moving_rate / workers of its distance, and the center
    moves toward the worker by the same amount. With ``rounds`` "synchronous", all workers use the center from the start
    of the round (equations 2 and 3), which is bit-reproducible. With "asynchronous", each moves it (algorithm 1).
    """

    reductions = ("flat",)
    supports = frozenset({"state_metrics", "multi_update", "activation_checkpointing"})
    period: Annotated[int, Range(least=1, hint="the unit is steps")] = 4
    moving_rate: Annotated[float, Range(above=0, most=1, hint="0.9 is typical")] = 0.9
    rounds: Rounds = "synchronous"
    nodes: int = 1

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_complex(model, because="the centre supports only real numbers")

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        if cluster.processes < 2:
            raise ConfigError(
                "easgd requires one process for the centre and at least one worker; got "
                f"cluster.processes={cluster.processes}. Set cluster.processes=2 or more."
            )
        return {"centre": Role(1, serves=True), "worker": Role(cluster.processes - 1)}

    def update_parts(self, cluster: Cluster, logical_ranks: int) -> int:
        return self.data_parallel(cluster)

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """Return the cost of exchanging all parameters with the center, over its single link, once per ``period``."""
        payload, workers, centre = work.parameter_bytes, range(1, cluster.processes), [0]
        seconds = 2 * estimate_push_seconds(payload, workers, centre, cluster) / self.period
        leaves = estimate_leaving_bytes(cluster, estimate_push_bytes(payload, workers, centre, cluster)) / self.period
        sent = len(workers) * payload / self.period
        return Cost(whole_bytes(work), sent, leaves, seconds, exposed_seconds=seconds, same=False)

    def prepare(self, folder: Path) -> None:
        if self.nodes > 1:
            create_authority(create_private_folder(folder) / "keys")

    def serve(self, recipe: Recipe, context: RunContext) -> None:
        """Serve the center through a Unix socket on one host, or mutual TLS between hosts."""
        workers, model = context.workers, recipe.model()
        meeting = context.meeting_place(needs="the easgd centre requires workers")
        credentials = self._credentials(_CENTRE, meeting.folder)
        unix = f"unix:{meeting.get_socket_path(_CENTRE)}"
        with open_listener(f"tcp:{meeting.address}:0" if credentials else unix, credentials) as listener:
            Registry(meeting.folder, meeting.timeout).acquire(_SERVICE, 1, get_listener_address(listener), _CENTRE)
            channels = accept_workers(listener, credentials, workers, meeting.timeout)
        numel = sum(parameter.numel() for parameter in find_trained_parameters(model))
        centre = Centre(channels, numel=numel, elasticity=self.moving_rate / workers)
        if self.rounds == "synchronous":
            centre.serve_synchronously()
        else:
            centre.serve_asynchronously()

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world, meeting = context.world, context.meeting_place(needs="easgd workers require the centre")
        name, registry = f"worker-{world.rank}", Registry(meeting.folder, meeting.timeout)
        credentials = self._credentials(name, meeting.folder)
        channel, _ = Dialer(name, registry, credentials, meeting.timeout, Operation).connect(_SERVICE, "worker")
        model = recipe.model().to(world.device)
        link = Link(channel, sum(parameter.numel() for parameter in find_trained_parameters(model)))
        inner = create_local_replica(recipe, model, context)
        return ElasticReplica(inner, world, link, period=self.period, elasticity=self.moving_rate / world.size)

    def _credentials(self, name: str, folder: Path) -> Credentials | None:
        return issue_certificate(folder / "keys", name) if self.nodes > 1 else None
