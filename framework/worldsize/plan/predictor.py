"""Predicts a run's step from its settings, the recipe's workload and its strategy's costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from worldsize.collectives.cost import compute_seconds_for, estimate_exposed_seconds
from worldsize.config.cluster import tier_around
from worldsize.config.settings import Settings
from worldsize.core import Cluster, ConfigError, Cost, Link, Workload
from worldsize.data.order import Order
from worldsize.devices import device_count
from worldsize.plan.calibrate import calibrate
from worldsize.plan.construction import check_trainable
from worldsize.plan.dry_run import check_alone, slowdown
from worldsize.plan.rehearsal.rank import RehearsedPart
from worldsize.plan.rehearsal.ranks import rehearse
from worldsize.world.world import threads_per_process


@dataclass(frozen=True)
class Given:
    """Values given by the user instead of measured."""

    parameter_bytes: float | None = None
    compute_seconds: float | None = None  # per rank and step
    overlap: float | None = None  # fraction of compute that communication can overlap
    links: Mapping[str, Link] = field(default_factory=dict)  # measured links
    one_machine: bool = False  # whether all nodes are this machine


def read_links(file: Path) -> dict[str, Link]:
    """Read the links measured by ``worldsize doctor --json``.

    Raises:
        ConfigError: the file is not a report of the doctor.
    """
    try:
        tiers = json.loads(file.read_text())["links"]
        return {tier: Link(**{name: float(value) for name, value in link.items()}) for tier, link in tiers.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} does not contain measured links ({error!r}). Create it with worldsize doctor --json."
        ) from None


@final
class Predictor:
    """Predicts the step time and memory of runs, and caches measurements between runs."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self._measured: dict[tuple[int, int, int], Workload] = {}

    def copy_with_parameters(self, parameter_bytes: float) -> Predictor:
        """Return a copy of this predictor for a model with ``parameter_bytes`` bytes."""
        return Predictor(replace(self.given, parameter_bytes=parameter_bytes))

    def resolve_cluster(self, settings: Settings) -> Cluster:
        """Return the configured cluster, with measured links in place of declared ones if available.

        If all nodes are in one rack, its link is used as the network, regardless of measurements between racks.
        """
        measured, around = self.given.links, tier_around(settings.config["cluster"])
        network = {"network": measured[around]} if around in measured else {}
        return replace(settings.cluster, links={**settings.cluster.links, **measured, **network})

    def forecast(self, settings: Settings) -> Forecast:
        """Predict time and memory of one training step of the run.

        Raises:
            ConfigError: the strategy cannot train the recipe, or lacks a cost model.
        """
        if self.given.parameter_bytes is None:  # the prediction is for the recipe's own step
            check_trainable(settings.recipe, settings.strategy)
        work = self.workload(settings)
        cost = settings.strategy.cost(work, self.resolve_cluster(settings))
        if cost is None:
            raise ConfigError("the strategy does not have a cost model")
        by_formula: str | None
        if self.given.parameter_bytes is None:
            rehearsed, by_formula = _rehearse_memory(settings)
            # two rehearsed steps may lack the synchronization of a periodic strategy; its own estimate includes it
            needed = rehearsed if cost.same and rehearsed else max(rehearsed, cost.memory_bytes)
            cost = replace(cost, memory_bytes=needed)
        else:
            by_formula = "--model-size does not provide a model to rehearse"
        return replace(forecast(cost, work, self._measure_compute(settings)), by_formula=by_formula)

    def _measure_compute(self, settings: Settings) -> float | None:
        """Measure the compute seconds of a rank's step under the strategy itself.

        Return None if compute is given, there is only one rank, the strategy requires peers, or memory is too small.
        """
        given, cluster = self.given, settings.cluster
        is_given = given.parameter_bytes or given.compute_seconds is not None
        if is_given or cluster.processes == 1 or len(settings.roles) > 1:
            return None
        try:
            at_once, threads = (
                self._count_concurrent_ranks(cluster, settings.roles["worker"].processes),
                _count_threads(cluster),
            )
            times = slowdown(settings, self._select_device(cluster), at_once=at_once, threads=threads)
        except (ConfigError, RuntimeError):  # the rank depends on its peers, or memory is too small for two replicas
            return None
        return times * scale_workload(self._micro_batch(settings), settings.micro_batches).compute_seconds

    def workload(self, settings: Settings) -> Workload:
        """Return the workload of one rank's step, assuming that all training ranks share the batch evenly."""
        given = self.given
        if given.parameter_bytes is not None:
            size, seconds = given.parameter_bytes, given.compute_seconds or 0.0
            work = Workload(size, 2 * size, compute_seconds=seconds, overlap=given.overlap or 0.0)
            return replace(work, micro_batches=settings.micro_batches)
        work = self._micro_batch(settings)
        work = scale_workload(work, settings.logical_ranks / settings.roles["worker"].processes)
        work = replace(work, micro_batches=settings.micro_batches)
        if given.compute_seconds is not None:
            update = min(work.update_seconds, given.compute_seconds)
            work = replace(work, compute_seconds=given.compute_seconds, update_seconds=update)
        return work if given.overlap is None else replace(work, overlap=given.overlap)

    def _micro_batch(self, settings: Settings) -> Workload:
        cluster, batch_size = settings.cluster, settings.training.batch_size // settings.logical_ranks
        key = (
            batch_size,
            self._count_concurrent_ranks(cluster, settings.roles["worker"].processes),
            _count_threads(cluster),
        )
        if key not in self._measured:
            order = Order(settings.training.seed, settings.training.batch_size, settings.logical_ranks, (0,))
            self._measured[key] = calibrate(
                settings.recipe, settings.numerics, order, self._select_device(cluster), at_once=key[1], threads=key[2]
            )
        return self._measured[key]

    def _select_device(self, cluster: Cluster) -> str:
        """Return the device type to measure on: the cluster's, or "cpu" if missing here and the step time is given."""
        if cluster.device == "cpu" or device_count(cluster.device):  # counting does not prevent a later fork
            return cluster.device
        if self.given.compute_seconds is None:
            raise ConfigError(
                f"failed to time the recipe's step: cluster.device={cluster.device} is not available on this "
                "machine. Pass --compute, e.g. --compute 250ms."
            )
        return "cpu"

    def _count_concurrent_ranks(self, cluster: Cluster, workers: int) -> int:
        """Return how many of the ``workers`` compute concurrently on one machine."""
        if cluster.device != "cpu" or self.given.compute_seconds is not None:
            return 1
        if self.given.one_machine or cluster.nodes == 1:
            return workers
        # cores of this machine; the cluster's nodes may have a different number
        return min(math.ceil(workers / cluster.nodes), len(os.sched_getaffinity(0)))


def _rehearse_memory(settings: Settings) -> tuple[float, str | None]:
    """Rehearse two steps and an evaluation on rank 0; return the peak tensor bytes.

    The second value is None, or the reason if the rehearsal is impossible or failed; the bytes are then 0.
    """
    if settings.numerics.activation_offload:
        return 0.0, "activations offloaded to the host are estimated"
    try:
        check_alone(settings)
        (rehearsed,) = rehearse(settings, [0], RehearsedPart())
    except ConfigError as error:
        return 0.0, str(error)
    if rehearsed.error is not None:
        return 0.0, f"the rehearsal failed {rehearsed.error}"
    return rehearsed.most, None


def _count_threads(cluster: Cluster) -> int:
    return cluster.threads or threads_per_process(cluster.processes_per_node)


@dataclass(frozen=True)
class Forecast:
    """The predicted times of a step on one rank.

    ``compute_seconds`` excludes the strategy's overhead, ``exposed_seconds`` is the wait for communication, and
    ``step_seconds`` covers the whole step. ``by_formula``: why memory is estimated by the strategy's formula (plus
    estimated activations, if any) instead of rehearsed; None if rehearsed.
    """

    cost: Cost
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    by_formula: str | None = None

    @property
    def efficiency(self) -> float:
        """Fraction of a step spent on compute, 0 to 1."""
        return self.compute_seconds / self.step_seconds if self.step_seconds else 1.0

    @property
    def added_seconds(self) -> float:
        """Seconds per step of computation added by the strategy, such as encoding."""
        computed = (self.step_seconds - self.exposed_seconds) * (1 - self.cost.idle)
        return max(0.0, computed - self.compute_seconds)

    def compute_seconds_for(self, wanted: float) -> float:
        """Return the compute seconds per step at which efficiency is ``wanted``, all else unchanged.

        Infinite if idle time alone (``cost.idle``) makes that impossible.
        """
        busy = 1 - self.cost.idle
        if wanted >= busy:
            return math.inf
        return compute_seconds_for(wanted / busy, self.added_seconds + busy * self.exposed_seconds)


def forecast(cost: Cost, work: Workload, computed: float | None = None) -> Forecast:
    """Predict a step; ``computed``: measured compute seconds under the strategy, or None.

    ``cost.idle`` is the idle fraction of a step excluding exposed communication. Overlapped communication is free.
    """
    if computed is None:
        computed = work.compute_seconds + cost.added_seconds
    exposed = cost.exposed_seconds
    if exposed is None:
        exposed = estimate_exposed_seconds(cost.communication_seconds, work.overlap * work.compute_seconds)
    step = computed / (1 - cost.idle) + exposed
    return Forecast(cost, min(work.compute_seconds, computed), exposed, step)


def scale_workload(work: Workload, micro_batches: float) -> Workload:
    """Scale ``work``, for one micro-batch, to ``micro_batches`` per step.

    A step has one update, and only the last micro-batch hides communication. ``micro_batches`` is less than one if each
    rank holds only a shard of the model.
    """
    once = work.update_seconds * min(1.0, micro_batches)
    seconds = (work.compute_seconds - work.update_seconds) * micro_batches + once
    hidden = work.overlap * work.compute_seconds * min(1.0, micro_batches)
    overlap = hidden / seconds if seconds else work.overlap
    return replace(work, compute_seconds=seconds, update_seconds=once, overlap=overlap)
