"""Runs one process of a run, from its folder to a World and its training: ``python -m worldsize.worker RUN_DIR``."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from worldsize.config.recorded import read_settings
from worldsize.config.settings import Settings
from worldsize.core import Failure, Listener, Outcome, Replica, RunContext, RunFailed, TransportFellBack, World
from worldsize.data.data_wait import DataWaitError
from worldsize.devices import backend_names
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.files import read_regular
from worldsize.messages import show_messages
from worldsize.observe.health.process import HealthProcess
from worldsize.observe.transport import audit, listen_to_nccl, nccl_log, transport_warning, write
from worldsize.record.determinism import seed_generators, stream
from worldsize.record.redaction import Scrubber, process_scrubber
from worldsize.record.run_directory import RunDirectory, make_folder_of, writing
from worldsize.record.run_record import opened
from worldsize.strategies.deferred.model import state_follows
from worldsize.strict_json import LARGEST, parse
from worldsize.train.averaging import AveragedReplica
from worldsize.train.before_update import BeforeUpdate
from worldsize.worker.carried import Carried
from worldsize.worker.context import context_of, listeners_of
from worldsize.worker.evaluation import evaluate_alone
from worldsize.worker.flight import hangs_watched
from worldsize.worker.healing import HealingMember
from worldsize.worker.probe import introduce, probe
from worldsize.worker.training import Training
from worldsize.world.environments import Placement, placement
from worldsize.world.meetings import Connections
from worldsize.world.membership import MembershipChannel, is_from_gone_peer
from worldsize.world.processes import PIPE, Preemption, ask_the_driver, leave_hangups, name_process
from worldsize.world.roles import role_of
from worldsize.world.world import check_size, open_world

_logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "The GPU's memory is full. Set more logical_ranks (smaller micro-batches), precision=bf16, "
    "activation_checkpointing=full, strategy=fsdp, or more processes; `worldsize plan` says what fits."
)


def main() -> None:
    """Run a process that torchrun, srun or mpirun has started, or one that CUDA refused after its fork."""
    show_messages()
    run = RunDirectory(Path(sys.argv[1]).resolve())
    watched = "WORLDSIZE_ATTEMPT" in os.environ  # a launching process keeps the record, and told the place
    try:
        config = OmegaConf.load(run.config)
        place = placement(os.environ, "torchrun" if watched else str(OmegaConf.select(config, "cluster.environment")))
    except (WorldsizeError, OSError) as error:
        sys.exit(f"{error}")
    try:
        if not place.rank and not watched:
            sys.exit(_recorded(run, place))
        if watched:
            leave_hangups()
        sys.exit(play(run, place, _inherited_channel(OmegaConf.select(config, "cluster.timeout"))))
    except Exception as error:
        if is_from_gone_peer(error):
            sys.exit(f"rank {place.rank} lost its peers: {_summary(error)}. Look for the rank that failed first.")
        if isinstance(error, WorldsizeError) and not (place.rank or watched):
            sys.exit(f"{error}")
        raise


def _inherited_channel(timeout: float) -> MembershipChannel | None:
    """Return the channel of a gang that heals, if this process had one when CUDA refused it."""
    if (descriptor := os.environ.pop(PIPE, None)) is None:
        return None
    os.set_inheritable(int(descriptor), False)
    return MembershipChannel.of(Connection(int(descriptor)), timeout)


def _recorded(run: RunDirectory, place: Placement) -> int:
    """Run the first rank of a run without a launching process, and keep the record of this attempt.

    Raises:
        WorldsizeError: the record cannot be opened or written.
    """
    with writing(run), opened(run) as record:
        record.begin_attempt([], world_size=place.world_size)
        begun, outcome = time.time_ns(), Outcome("failed", 1)
        try:
            code = play(run, place)
            outcome = Outcome("preempted" if code else "completed", code)
        except BaseException:
            outcome = replace(outcome, failure=_first_failure(run, begun))
            raise
        finally:
            record.end_attempt(outcome)
    return outcome.exit_code


def _first_failure(run: RunDirectory, begun: int) -> Failure | None:
    """Return the first error that a process has left since ``begun``; errors about lost peers come last."""
    failures = list[tuple[bool, Failure]]()
    for file in (run.path / "logs").rglob("*.error.json"):
        with suppress(OSError, ValueError, KeyError):
            error = parse(read_regular(file, at_most=LARGEST))
            role, _, rank = file.name.removesuffix(".error.json").rpartition("_")
            left = Failure(role, int(rank), error["traceback"], 1, time_ns=error["time_ns"], host=error["host"])
            failures += [("lost_peer" in error, left)] if left.time_ns >= begun else []
    return min(failures, key=lambda each: (each[0], each[1].time_ns))[1] if failures else None


def play(run: RunDirectory, placement: Placement, channel: MembershipChannel | None = None) -> int:
    """Run this process's role until the run ends; return the exit code.

    An error is also written next to the process's log. ``channel`` tells a process of a gang that heals of its members.
    """
    settings, listeners = None, list[Listener]()
    ask_the_driver()
    clean = process_scrubber({})  # before the settings take the secrets out of the environment
    try:
        settings = read_settings(run)
        check_size(placement, settings.roles)
        if settings.run.examine:
            return _examine(settings, run, placement)
        if settings.run.evaluates is not None:
            return _play(settings, run, placement, [], Preemption([]), None)  # signals end it
        preemption = Preemption(settings.checkpoint.signals)
        name_process(placement.rank)
        with _health_watched(settings, run, placement):
            listeners = listeners_of(settings, run, placement.rank, preemption)
            return _play(settings, run, placement, listeners, preemption, channel)
    except BaseException as error:
        _write_error(run, _error_file(run, placement, settings), error, clean)
        for listener in listeners:  # after the error is written, since a logger may be slow
            listener(RunFailed(clean.text(f"{type(error).__name__}: {error}")))
        raise


def _health_watched(settings: Settings, run: RunDirectory, placement: Placement) -> AbstractContextManager[object]:
    """Watch this node if no launching process does, as for processes that torchrun, srun or mpirun has started."""
    limits, has_launcher = settings.observe.watched, placement.heartbeat is not None
    if limits is None or has_launcher or placement.local_rank:
        return nullcontext()
    return HealthProcess(run.path, limits, node=placement.node_rank, root=os.getppid())


def _error_file(run: RunDirectory, placement: Placement, settings: Settings | None) -> Path:
    with suppress(ConfigError):
        if settings is not None:
            return run.error(*role_of(placement.rank, settings.roles))
    return run.error("process", placement.rank)  # the role of this process is unknown


def _write_error(run: RunDirectory, path: Path, error: BaseException, clean: Scrubber) -> None:
    """Write an error, which may quote a secret value, without such values."""
    text = f"{error}\n" if isinstance(error, WorldsizeError) else traceback.format_exc()
    if isinstance(error, torch.OutOfMemoryError):
        text += f"{_OUT_OF_MEMORY}\n"
    cause: dict[str, Any] = {"time_ns": time.time_ns(), "cause": f"{type(error).__name__}: {error}", "traceback": text}
    cause |= {"host": socket.gethostname(), "is_own": isinstance(error, DataWaitError)}
    if is_from_gone_peer(error):
        cause["lost_peer"] = _summary(error)
    with suppress(OSError):  # the disk is full, or the run folder was deleted; the launching process reports that
        make_folder_of(path, run)
        path.write_text(json.dumps(clean.tree(cause)))


def _summary(error: BaseException) -> str:
    """Return an error's type and message in one line, without gloo's advice."""
    message = str(error).partition(" This is typically caused by")[0].strip()
    return f"{type(error).__name__}: {' '.join(message.split())}".rstrip(".")


def _play(
    settings: Settings,
    run: RunDirectory,
    placement: Placement,
    listeners: list[Listener],
    preemption: Preemption,
    channel: MembershipChannel | None,
) -> int:
    settings.determinism.apply(settings.cluster.device)
    _listen(settings, run, placement)
    with open_world(placement, settings.cluster, settings.roles) as world, ExitStack() as stack:
        seed_generators(stream(settings.training.seed, "init"), world.device)
        settings.faults.begin(world.global_rank, placement.attempt + placement.starts)
        if settings.heals and settings.run.evaluates is None:
            return _heal(settings, run, world, placement, listeners, preemption, channel)
        _audit(settings, run, world, placement, listeners)
        stack.enter_context(_hangs_watched(settings, run, placement))
        carried = Carried(settings, placement.heartbeat)
        with _beginning(settings, run, world, carried):
            replica = _replica(settings, context_of(settings, run, world, placement, preemption))
        if replica is None:
            return 0
        if settings.run.evaluates is not None:
            evaluate_alone(settings, run, world, replica, settings.run.evaluates)
            return 0
        listeners = listeners or listeners_of(settings, run, 0, preemption)  # it replaces a failed leader
        return Training(settings, run, world, replica, listeners, preemption, carried).run()


def _beginning(settings: Settings, run: RunDirectory, world: World, carried: Carried) -> AbstractContextManager[None]:
    """Return a context for making the replica, in which no weights are made that are then loaded."""
    if settings.run.evaluates is not None:
        return state_follows()
    if settings.roles[world.role].serves:  # it loads what it serves by itself
        return nullcontext()
    return carried.beginning(run, world)


def _hangs_watched(
    settings: Settings, run: RunDirectory, placement: Placement
) -> AbstractContextManager[Callable[[], None]]:
    log, asked, cluster = (
        run.log(*role_of(placement.rank, settings.roles)),
        run.hang(placement.attempt),
        settings.cluster,
    )
    return hangs_watched(log, asked, attempt=placement.attempt, timeout=cluster.timeout, counts=cluster.debug)


def _heal(
    settings: Settings,
    run: RunDirectory,
    world: World,
    placement: Placement,
    listeners: list[Listener],
    preemption: Preemption,
    channel: MembershipChannel | None,
) -> int:
    """Train in a gang that goes on without those of its members that die."""
    if channel is None:
        raise ConfigError(
            "strategy.on_failure=heal: nothing tells this process which others live. Start the run with worldsize on "
            "this machine (cluster=laptop or node), or set strategy.on_failure=restart."
        )

    def make_replica(
        settings: Settings, world: World, before_update: BeforeUpdate, connections: Connections
    ) -> Replica:
        joined()
        _audit(settings, run, world, placement, listeners)
        seed_generators(stream(settings.training.seed, "init"), world.device)
        context = context_of(settings, run, world, placement, preemption)
        context = replace(context, before_update=before_update, making_groups=lambda: connections)
        replica = _replica(settings, context)
        assert replica is not None
        return replica

    with _hangs_watched(settings, run, placement) as joined:
        return HealingMember(settings, run, placement, channel, listeners, preemption).run(world, make_replica)


def _examine(settings: Settings, run: RunDirectory, placement: Placement) -> int:
    """Join the run as usual, and measure instead of training."""
    Preemption([])  # signals end it
    introduce(placement, settings.cluster, run.findings)
    _listen(settings, run, placement)
    with open_world(placement, settings.cluster, settings.roles) as world:
        transport = audit(world, settings.cluster, os.environ, _nccl_log(run, placement))
        return probe(world, placement, settings.cluster, transport, run.findings, pairs=settings.run.examine == "pairs")


def _listen(settings: Settings, run: RunDirectory, placement: Placement) -> None:
    if "nccl" in backend_names(settings.cluster.backend) and "NCCL_DEBUG" not in os.environ:
        log = _nccl_log(run, placement)
        make_folder_of(log, run)
        os.environ.update(listen_to_nccl(log.parent, attempt=_attempt(placement)))


def _nccl_log(run: RunDirectory, placement: Placement) -> Path:
    host = socket.gethostname()
    # NCCL names the file after the host up to its first dot
    return nccl_log(
        run.nccl_logs(host), host=host.partition(".")[0], process=str(os.getpid()), attempt=_attempt(placement)
    )


def _attempt(placement: Placement) -> int | None:
    """Return the number of the attempt if a launching process counts; torchrun, srun and mpirun tell none."""
    return placement.attempt if placement.heartbeat is not None else None


def _audit(
    settings: Settings, run: RunDirectory, world: World, placement: Placement, listeners: Sequence[Listener]
) -> None:
    """Determine which transport the gang uses; its first rank records it, and tells if it is not the declared one.

    In a gang that heals each membership does so, since each has connections of its own: what is known in the last one
    is recorded.
    """
    if world.size < 2 or settings.roles[world.role].serves:
        return
    transport = audit(world, settings.cluster, os.environ, _nccl_log(run, placement))
    if world.rank == 0:
        write(run.transport, transport)
        if reason := transport_warning(transport, settings.cluster):
            _logger.warning("%s", reason)
            for listener in listeners:
                listener(TransportFellBack(reason, transport.get("ranks", {}), transport["interface"]))


def _replica(settings: Settings, context: RunContext) -> Replica | None:
    """Return the replica that this process trains; serve until the end and return None if it is a server."""
    serves = settings.roles[context.world.role].serves
    if serves:
        return settings.strategy.serve(settings.recipe, context)
    replica = settings.strategy.replica(settings.recipe, context)
    return AveragedReplica(replica, settings.average) if settings.average else replica
