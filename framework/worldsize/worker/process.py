"""Runs one process of a run, given the run folder: ``python -m worldsize.worker RUN_DIR``."""

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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from worldsize.checkpoint.format import complete, parse_step
from worldsize.config.recorded import read_settings
from worldsize.config.settings import Settings
from worldsize.core import Failure, Listener, Outcome, Replica, RunContext, RunFailed, TransportFellBack, World
from worldsize.data.data_wait import DataWaitError
from worldsize.devices import backend_names
from worldsize.errors import BitMismatchError, ConfigError, WorldsizeError
from worldsize.files import read_regular
from worldsize.healing.groups import Connections
from worldsize.healing.loop import HealingMember
from worldsize.healing.loop_state import GangHooks, LoopState
from worldsize.healing.membership import MembershipChannel, is_from_gone_peer
from worldsize.healing.rewind import REWOUND, apply_request, conclude_attempt, read_request
from worldsize.loop.averaging import AveragedReplica
from worldsize.loop.recording import RecordingReplica
from worldsize.messages import show_messages
from worldsize.observe.health.process import HealthProcess
from worldsize.observe.summary import show_summary
from worldsize.observe.transport import detect_transport, listen_to_nccl, nccl_log, transport_warning, write_transport
from worldsize.record.redaction import Scrubber, process_scrubber
from worldsize.record.run_directory import RunDirectory, create_parent_folders, wrap_write_errors
from worldsize.record.run_record import open_record, read_result
from worldsize.seeds import derive_seed, seed_generators
from worldsize.strategies.deferred.model import state_follows
from worldsize.strict_json import LARGEST, parse_strict_json
from worldsize.worker.context import ProcessResources, create_listeners, create_run_context
from worldsize.worker.evaluation import evaluate_alone
from worldsize.worker.flight import hangs_watched
from worldsize.worker.probe import introduce, measure_cluster
from worldsize.worker.training import Training
from worldsize.world.environments import Placement, placement
from worldsize.world.processes import PIPE, Preemption, ask_the_driver, leave_hangups, name_process
from worldsize.world.roles import find_role
from worldsize.world.world import check_size, open_world

_logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "GPU out of memory. Increase logical_ranks (smaller micro-batches), set precision=bf16, "
    "activation_checkpointing=full or strategy=fsdp, or add processes. `worldsize plan` lists options that fit."
)


def main() -> None:
    """Run a process that torchrun, srun or mpirun started, or that re-executed for CUDA."""
    show_messages()
    run = RunDirectory(Path(sys.argv[1]).resolve())
    watched = "WORLDSIZE_ATTEMPT" in os.environ  # a launching process writes the record, and has set the placement
    try:
        config = OmegaConf.load(run.config)
        place = placement(os.environ, "torchrun" if watched else str(OmegaConf.select(config, "cluster.environment")))
    except (WorldsizeError, OSError) as error:
        sys.exit(f"{error}")
    try:
        if not place.rank and not watched:
            sys.exit(_run_and_record(run, place))
        if watched:
            leave_hangups()
        sys.exit(run_role(run, place, _open_inherited_channel(OmegaConf.select(config, "cluster.timeout"))))
    except Exception as error:
        if is_from_gone_peer(error):
            sys.exit(
                f"rank {place.rank} lost its peers: {_summarize_error(error)}. Look for the rank that failed first."
            )
        if isinstance(error, WorldsizeError) and not (place.rank or watched):
            sys.exit(f"{error}")
        raise


def _open_inherited_channel(timeout: float) -> MembershipChannel | None:
    """Return the channel to the healing gang that a re-execution for CUDA left open, or None."""
    if (descriptor := os.environ.pop(PIPE, None)) is None:
        return None
    os.set_inheritable(int(descriptor), False)
    return MembershipChannel.from_pipe(Connection(int(descriptor)), timeout)


def _run_and_record(run: RunDirectory, place: Placement) -> int:
    """Run the first rank of a run without a launching process, and record this attempt.

    Raises:
        WorldsizeError: the record cannot be opened or written.
    """
    with wrap_write_errors(run), open_record(run) as record:
        if read_request(run) is not None:  # not applied here, since the other ranks may have read the configuration
            raise WorldsizeError(f"{run.path} has to go back before a spike. Run `worldsize resume {run.path}`.")
        record.begin_attempt([], world_size=place.world_size)
        begun, outcome = time.time_ns(), Outcome("failed", 1)
        try:
            code = run_role(run, place)
            outcome = Outcome("preempted" if code else "completed", code)
        except BaseException:
            outcome = replace(outcome, failure=_first_failure(run, begun))
            raise
        finally:
            outcome = record.end_attempt(conclude_attempt(record, outcome))
        if outcome.exit_reason == REWOUND:
            apply_request(record)
        _show_end(run, outcome)
    return outcome.exit_code


def _show_end(run: RunDirectory, outcome: Outcome) -> None:
    """Show the metrics of a completed run, or the step at which it stopped and saved."""
    if outcome.exit_reason == "completed":
        if "metrics" in (result := read_result(run)):
            show_summary(Console(), result, run.path)
    elif outcome.failure:
        _logger.error("%s", outcome.failure.cause)
    elif outcome.exit_reason == REWOUND:
        _logger.error("stopped at a spike; run the same command again to go back before it")
    elif saved := complete(run.checkpoints):
        step = parse_step(saved[-1])
        _logger.error("stopped and saved at step %d; run the same command again to resume", step)


def _first_failure(run: RunDirectory, begun: int) -> Failure | None:
    """Return the first error recorded since ``begun``; errors about lost peers come last."""
    failures = list[tuple[bool, Failure]]()
    for file in (run.path / "logs").rglob("*.error.json"):
        with suppress(OSError, ValueError, KeyError):
            error = parse_strict_json(read_regular(file, at_most=LARGEST))
            role, _, rank = file.name.removesuffix(".error.json").rpartition("_")
            left = Failure(role, int(rank), error["traceback"], 1, time_ns=error["time_ns"], host=error["host"])
            failures += [("lost_peer" in error, left)] if left.time_ns >= begun else []
    return min(failures, key=lambda each: (each[0], each[1].time_ns))[1] if failures else None


def run_role(run: RunDirectory, placement: Placement, channel: MembershipChannel | None = None) -> int:
    """Run this process's role until the run ends; return the exit code.

    Errors are also written next to the process's log. ``channel`` announces the members of a healing gang.
    """
    settings, listeners = None, list[Listener]()
    ask_the_driver()
    clean = process_scrubber({})  # before read_settings() removes the secrets from the environment
    try:
        settings = read_settings(run)
        check_size(placement, settings.roles)
        if settings.run.examine:
            return _examine_cluster(settings, run, placement)
        if settings.run.evaluates is not None:  # without handlers, so that signals end it
            return _run_in_world(
                ProcessResources(settings, run, placement.heartbeat, [], Preemption([])), placement, None
            )
        preemption = Preemption(settings.checkpoint.signals)
        name_process(placement.rank)
        with _health_watched(settings, run, placement):
            shows = placement.heartbeat is None  # torchrun, srun and mpirun do not show the progress
            listeners = create_listeners(settings, run, placement.rank, preemption, shows=shows)
            resources = ProcessResources(settings, run, placement.heartbeat, listeners, preemption)
            return _run_in_world(resources, placement, channel)
    except BaseException as error:
        _write_error(run, _error_file(run, placement, settings), error, clean)
        for listener in listeners:  # only after writing the error, since a logger may be slow
            listener(RunFailed(clean.scrub_text(f"{type(error).__name__}: {error}")))
        raise


def _health_watched(settings: Settings, run: RunDirectory, placement: Placement) -> AbstractContextManager[object]:
    """Monitor this node's health in this block, unless a launching process does.

    There is no launching process under torchrun, srun and mpirun.
    """
    limits, has_launcher = settings.observe.watched, placement.heartbeat is not None
    if limits is None or has_launcher or placement.local_rank:
        return nullcontext()
    return HealthProcess(run.path, limits, node=placement.node_rank, root=os.getppid())


def _error_file(run: RunDirectory, placement: Placement, settings: Settings | None) -> Path:
    with suppress(ConfigError):
        if settings is not None:
            return run.get_error_file(*find_role(placement.rank, settings.roles))
    return run.get_error_file("process", placement.rank)  # its role is unknown


def _write_error(run: RunDirectory, path: Path, error: BaseException, clean: Scrubber) -> None:
    """Write an error to ``path`` with secret values removed."""
    text = f"{error}\n" if isinstance(error, WorldsizeError) else traceback.format_exc()
    if isinstance(error, torch.OutOfMemoryError):
        text += f"{_OUT_OF_MEMORY}\n"
    cause: dict[str, Any] = {"time_ns": time.time_ns(), "cause": f"{type(error).__name__}: {error}", "traceback": text}
    cause |= {"host": socket.gethostname(), "is_own": isinstance(error, DataWaitError)}
    if isinstance(error, BitMismatchError):
        cause |= {"has_wrong_bits": True, "is_of_other": not error.is_guilty, "ends_run": error.ends_run}
    cause["is_refusal"] = isinstance(error, ConfigError) and not _is_from_storage(error)
    if is_from_gone_peer(error):
        cause["lost_peer"] = _summarize_error(error)
    with suppress(OSError):  # the disk is full, or the run folder was deleted; the launching process reports that
        create_parent_folders(path, run)
        path.write_text(json.dumps(clean.scrub_tree(cause)))


def _is_from_storage(error: BaseException | None) -> bool:
    """Return whether a file or network error is among the causes; it may not recur."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _summarize_error(error: BaseException) -> str:
    """Return an error's type and message in one line, without gloo's advice."""
    message = str(error).partition(" This is typically caused by")[0].strip()
    return f"{type(error).__name__}: {' '.join(message.split())}".rstrip(".")


def _run_in_world(resources: ProcessResources, placement: Placement, channel: MembershipChannel | None) -> int:
    settings, run = resources.settings, resources.run
    settings.determinism.apply(settings.cluster.device)
    _enable_nccl_log(settings.cluster.backend, run, placement)
    with open_world(placement, settings.cluster, settings.roles) as world, ExitStack() as stack:
        seed_generators(derive_seed(settings.training.seed, "init"), world.device)
        settings.faults.arm_faults(world.global_rank, placement.attempt + placement.starts)
        if settings.heals and settings.run.evaluates is None:
            return _run_healing_member(resources, world, placement, channel)
        _audit_transport(settings, run, world, placement, resources.listeners)
        stack.enter_context(_hangs_watched(settings, run, placement))
        state, context = _beginning(settings, run, world)
        with context:
            replica = _create_replica(settings, run, create_run_context(resources, settings, world, placement))
        if replica is None:
            return 0
        if settings.run.evaluates is not None:
            evaluate_alone(settings, run, world, replica, settings.run.evaluates)
            return 0
        if not resources.listeners:  # this process replaces a failed leader
            resources.listeners = create_listeners(settings, run, 0, resources.preemption)
        return Training(resources, settings, world, replica, state, GangHooks()).run()


def _beginning(settings: Settings, run: RunDirectory, world: World) -> tuple[LoopState, AbstractContextManager[None]]:
    """Return the initial state, and a context in which to create the replica.

    The context skips the initialization of weights if all weights will be loaded.
    """
    if settings.run.evaluates is not None:
        return LoopState(), state_follows()
    if settings.roles[world.role].serves:  # a server loads its own state
        return LoopState(), nullcontext()
    return LoopState().prepare_start(settings, run, world)


def _hangs_watched(
    settings: Settings, run: RunDirectory, placement: Placement
) -> AbstractContextManager[Callable[[], None]]:
    log, asked, cluster = (
        run.get_log_file(*find_role(placement.rank, settings.roles)),
        run.get_hang_file(placement.attempt),
        settings.cluster,
    )
    return hangs_watched(log, asked, attempt=placement.attempt, timeout=cluster.timeout, counts=cluster.debug)


def _run_healing_member(
    resources: ProcessResources, world: World, placement: Placement, channel: MembershipChannel | None
) -> int:
    """Train in a healing gang, which continues without failed members."""
    if channel is None:
        raise ConfigError(
            "strategy.on_failure=heal requires processes started by worldsize. Start the run with worldsize on "
            "this machine (cluster=laptop or node), or set strategy.on_failure=restart."
        )
    run = resources.run

    def make_replica(settings: Settings, world: World, connections: Connections) -> Replica:
        joined()
        if world.rank == 0:
            resources.log_run()
        _audit_transport(settings, run, world, placement, resources.listeners)
        seed_generators(derive_seed(settings.training.seed, "init"), world.device)
        context = create_run_context(resources, settings, world, placement)
        context = replace(context, before_update=resources.before_update, making_groups=lambda: connections)
        replica = _create_replica(settings, run, context)
        assert replica is not None
        return replica

    with _hangs_watched(resources.settings, run, placement) as joined:
        resources.build_datasets(world)
        settings, train = resources.settings, partial(Training, resources)
        member = HealingMember(settings, run, placement, channel, make_replica, train, emit=resources.emit)
        return member.run(world)


def _examine_cluster(settings: Settings, run: RunDirectory, placement: Placement) -> int:
    """Join the run like a training process, but measure the cluster's links instead of training."""
    Preemption([])  # without handlers, so that signals end the examination
    introduce(placement, settings.cluster, run.findings)
    _enable_nccl_log(settings.cluster.backend, run, placement)
    with open_world(placement, settings.cluster, settings.roles) as world:
        transport = detect_transport(world, settings.cluster, os.environ, _nccl_log(run, placement))
        return measure_cluster(
            world, placement, settings.cluster, transport, run.findings, pairs=settings.run.examine == "pairs"
        )


def _enable_nccl_log(backend: str, run: RunDirectory, placement: Placement) -> None:
    if "nccl" in backend_names(backend) and "NCCL_DEBUG" not in os.environ:
        log = _nccl_log(run, placement)
        create_parent_folders(log, run)
        os.environ.update(listen_to_nccl(log.parent, attempt=_get_attempt(placement)))


def _nccl_log(run: RunDirectory, placement: Placement) -> Path:
    host = socket.gethostname()
    # NCCL names the file after the host up to its first dot
    return nccl_log(
        run.nccl_logs(host), host=host.partition(".")[0], process=str(os.getpid()), attempt=_get_attempt(placement)
    )


def _get_attempt(placement: Placement) -> int | None:
    """Return the number of the attempt; None under torchrun, srun and mpirun."""
    return placement.attempt if placement.heartbeat is not None else None


def _audit_transport(
    settings: Settings, run: RunDirectory, world: World, placement: Placement, listeners: Sequence[Listener]
) -> None:
    """Determine the gang's transport, and record it on rank 0.

    Rank 0 also warns if the transport is slower than the declared one. A healing gang repeats this in each membership,
    because connections are new; the last result is recorded.
    """
    if world.size < 2 or settings.roles[world.role].serves:
        return
    transport = detect_transport(world, settings.cluster, os.environ, _nccl_log(run, placement))
    if world.rank == 0:
        write_transport(run.transport, transport)
        if reason := transport_warning(transport, settings.cluster):
            _logger.warning("%s", reason)
            for listener in listeners:
                listener(TransportFellBack(reason, transport.get("ranks", {}), transport["interface"]))


def _create_replica(settings: Settings, run: RunDirectory, context: RunContext) -> Replica | None:
    """Return the replica that this process trains.

    A server serves until the run ends. It returns a replica only if it runs the training loop, otherwise None.
    """
    serves = settings.roles[context.world.role].serves
    if serves:
        return settings.strategy.serve(settings.recipe, context)
    replica, profile = settings.strategy.replica(settings.recipe, context), settings.observe.profile
    if profile.operations is not None:
        folder, step, saved = run.operations, profile.operations, profile.saved_operation
        replica = RecordingReplica(replica, settings.recipe, folder, rank=context.world.rank, step=step, saved=saved)
    return AveragedReplica(replica, settings.average) if settings.average else replica
