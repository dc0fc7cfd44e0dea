"""Launches or resumes a run: turns a configuration into a plan, a folder and processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from worldsize.checkpoint.format import complete, parse_step
from worldsize.checkpoint.weights import resolve_source
from worldsize.collectives.cluster_cost import crossings_text
from worldsize.config.compose import is_sweep, read_group_choices
from worldsize.config.composed import build_settings, check_effects, collect_lengths, override_values
from worldsize.config.objective import Trial, compute_objective, is_search
from worldsize.config.purpose import TRAIN, Purpose, Train
from worldsize.config.settings import Settings
from worldsize.config.shape import check_resumes
from worldsize.core import AgentLauncher, BatchLauncher, Cluster, Failure, Launcher, LaunchMethod, Outcome, Plan
from worldsize.data.order import refuse_skips, sample_lengths
from worldsize.data.source import check_paths
from worldsize.errors import ConfigError, MissingProgramError, RunFolderError, SchedulerUnreachableError, WorldsizeError
from worldsize.healing.rewind import check_skipped, plan_rewind, replace_skipped_samples
from worldsize.launch.local import Local
from worldsize.launch.record import add_secrets, amend_record, check_initial, check_same, create_scrubber, write_record
from worldsize.launch.restarts import command_line, is_discarded, run_attempts
from worldsize.launch.scheduled import wait_for
from worldsize.launch.sweep import read_run_end, show_ends
from worldsize.messages import last_error, outlive_output
from worldsize.observe.subprocess_listeners import wait_for_listeners
from worldsize.observe.summary import show_summary
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.record.run_directory import RunDirectory, create_run_folder, plan_run_directory, wrap_write_errors
from worldsize.record.run_record import RunRecord, note_job, open_record, read_result, refresh_run
from worldsize.seeds import keep_generators
from worldsize.world.processes import will_fork
from worldsize.world.roles import can_heal

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Launch:
    """A recorded run that is ready to be started."""

    settings: Settings
    plan: Plan
    run: RunDirectory


def execute_run(cfg: DictConfig, sweep: list[Launch], recorded: Callable[[Path], None] = lambda folder: None) -> Trial:
    """Check, record and run the configuration; return its exit code and objective value.

    If a process on this machine refuses the configuration, the exit code is 2, and the run folder is removed.

    Args:
        cfg: The composed configuration.
        sweep: List to append the run to if :func:`submit_sweep` submits it later, together with others.
        recorded: Callback with the run folder, called once the run has a record.

    Raises:
        ConfigError: the run cannot start; no process was started, and no run folder remains.
        SweepEnded: the run ended without the metric that the sweep optimizes.
    """
    settings = prepare_settings(cfg, [(each.settings.launcher, each.settings.cluster) for each in sweep])
    is_submitted_together = isinstance(settings.launcher, BatchLauncher) and is_sweep()
    run = plan_run_directory(Path(cfg.run.root), read_group_choices()["recipe"], cfg.run.name)
    plan = settings.create_plan(run.path)
    if cfg.launch == "show":
        for each in collect_lengths(cfg).values():
            print(
                f"{each.key}: {each.text} = {each.count_steps(settings.recipe, settings.training.batch_size):,} steps"
            )
        if is_submitted_together:
            sweep.append(Launch(settings, plan, run))
            return Trial(0)
        return Trial(_print_plans([plan], settings))
    clean = create_scrubber(cfg, settings.config)
    plan = add_secrets(settings.config, plan, clean)
    outlive_output()
    with create_run_folder(run, is_private=settings.run.private) as remove_folder:
        write_record(settings, plan, run, clean)
    recorded(run.path)
    if cfg.launch == "write":
        settings.launcher.write(plan)
        print(f"{settings.launcher.describe(plan)}\nwritten to {run.path}; nothing was started")
        return Trial(0)
    if is_submitted_together:
        sweep.append(Launch(settings, plan, run))
        return Trial(0)
    outcome = _start_run(settings, plan, run, open_record(run, plan.secrets))
    is_local = isinstance(settings.launcher, Launcher)
    if outcome.failure and is_local and is_discarded(outcome, run, len(refresh_run(run).attempts)):
        wait_for_listeners(run.path / "logs")
        remove_folder()
        return Trial(outcome.exit_code, why=last_error(outcome.failure.cause))
    if outcome.exit_code:
        return Trial(outcome.exit_code, why=_find_reason(outcome, run), folder=run.path)
    is_compared = cfg.sweep.metric is not None and is_sweep()
    value = compute_objective(cfg.sweep, read_result(run)["metrics"]) if is_compared else None
    return Trial(0, value, folder=run.path)


def _find_reason(outcome: Outcome, run: RunDirectory) -> str:
    """Return the reason why a run did not complete."""
    try:
        recorded = refresh_run(run)
    except WorldsizeError:  # the run folder was deleted
        return outcome.exit_reason
    return recorded.failure or recorded.exit_reason or outcome.exit_reason


def prepare_settings(cfg: DictConfig, asked: list[tuple[LaunchMethod, Cluster]]) -> Settings:
    """Build a new run's settings, and run all checks that need neither folder nor processes.

    ``asked`` lists the (launcher, cluster) pairs already checked; this run's pair is appended.

    Raises:
        ConfigError: the run cannot be started.
    """
    # init_from may name a run; record its newest checkpoint, which may change later
    settings = build_checked_settings(
        cfg, Train(None if cfg.init_from is None else resolve_source(Path(cfg.init_from)))
    )
    check_effects(cfg)
    if is_sweep() and isinstance(settings.launcher, BatchLauncher):
        _check_submission(settings.launcher)
    if settings.initial:
        makes_rows = any(role.serves for role in settings.roles.values())
        settings.initial.check_recipe(settings.recipe, makes_rows=makes_rows)
    target = (settings.launcher, settings.cluster)
    if cfg.launch != "show" and target not in asked:  # the shown script may be for a different machine
        asked.append(target)
        _check_launcher(*target, is_started=cfg.launch == "run")
    return settings


def _check_launcher(launcher: LaunchMethod, cluster: Cluster, *, is_started: bool) -> None:
    """Check the launcher.

    Unless ``is_started``, a missing program or an unreachable scheduler is only a warning.
    """
    try:
        launcher.check(cluster)
    except (MissingProgramError, SchedulerUnreachableError) as error:
        if is_started:
            raise
        _logger.warning("%s", error)


def _check_submission(launcher: BatchLauncher) -> None:
    """Raise ConfigError if this sweep's runs cannot be submitted together."""
    name = type(launcher).__name__
    if is_search():
        raise ConfigError(
            f"{name} submits all runs of a sweep at once, but a search requires the metric of a run before the next "
            "run. Choose a cluster whose launcher starts processes, e.g. cluster=laptop, or remove hydra/sweeper."
        )
    if HydraConfig.get().runtime.choices["hydra/launcher"] != "basic":
        raise ConfigError(f"{name} already runs the points of a sweep in parallel. Remove hydra/launcher.")


def build_checked_settings(cfg: DictConfig, purpose: Purpose = TRAIN) -> Settings:
    """Build a run's settings for ``purpose``, and check that this process can start the run.

    Raises:
        ConfigError: the run cannot be started.
    """
    will_fork()
    settings = build_settings(cfg, purpose)
    if type(settings.recipe).__module__ == "__main__" and not isinstance(settings.launcher, Local):
        name = type(settings.recipe).__name__
        raise ConfigError(
            f"{name} is defined in __main__, which only forked processes can import. Move the class to a file "
            "(`worldsize new recipe NAME` creates one), or train on this machine with cluster=laptop."
        )
    if isinstance(settings.launcher, Launcher):  # otherwise the agents on the other machines check the data
        check_paths(settings.recipe)
        if settings.run.evaluates is None:
            with suppress(OSError, ImportError), keep_generators():  # a worker reports a clearer error
                if settings.skips_samples or settings.training.length_balanced:
                    train = settings.recipe.data("train")
                if settings.skips_samples:
                    refuse_skips(train)
                if settings.training.length_balanced:
                    sample_lengths(train)
    check_trainable(settings.recipe, settings.strategy)
    check_construction(
        settings.recipe,
        settings.strategy,
        settings.numerics,
        settings.cluster,
        averages=bool(settings.average),
        schedule_metric=settings.training.schedule_metric,
    )
    return settings


def _start_run(settings: Settings, plan: Plan, run: RunDirectory, record: AbstractContextManager[RunRecord]) -> Outcome:
    """Pass the plan to the launcher; return the run's outcome.

    ``record`` is entered only if this process runs the attempts; jobs and agents lock and update the record themselves.
    """
    print(settings.update_text(), flush=True)
    try:
        with wrap_write_errors(run):
            return _launch_run(settings, plan, run, record)
    except RunFolderError as error:
        _logger.error("%s", error)
        return Outcome("failed", 1)


def _launch_run(
    settings: Settings, plan: Plan, run: RunDirectory, record: AbstractContextManager[RunRecord]
) -> Outcome:
    match settings.launcher:
        case BatchLauncher():
            return Outcome("ended", _submit_batches([[Launch(settings, plan, run)]]))
        case AgentLauncher() as launcher:
            attempts = len(refresh_run(run).attempts)
            outcome = launcher.launch_agents(plan).wait()
            if (
                outcome.failure and len(refresh_run(run).attempts) == attempts
            ):  # failed before an agent recorded an attempt
                _record_failed_start(run, outcome.failure, plan)
            return outcome
        case launcher:
            with record as held:
                steps, is_new = settings.training.steps, not held.attempts
                return run_attempts(launcher, settings.strategy, plan, held, steps=steps, is_new=is_new)


def _record_failed_start(run: RunDirectory, failure: Failure, plan: Plan) -> None:
    with suppress(WorldsizeError), open_record(run, plan.secrets) as record:  # refused if an agent still holds the lock
        record.give_up(f"{failure.host}: {failure.cause}", unstarted=plan.world_size)


def _print_plans(plans: Sequence[Plan], settings: Settings) -> int:
    """Print the script or command that starts ``plans``; ``settings`` are the first plan's."""
    cluster, launcher = settings.cluster, settings.launcher
    try:
        launcher.check(cluster)
    except ConfigError as error:
        _logger.warning("launching from this machine would fail: %s", error)
    notes = [settings.update_text(), crossings_text(cluster, settings.strategy.groups(cluster))]
    shown = launcher.describe_all(plans) if isinstance(launcher, BatchLauncher) else launcher.describe(plans[0])
    print(shown, *(f"# {note}" for note in notes if note), sep="\n")  # notes are comments in scripts
    return 0


def submit_sweep(sweep: Sequence[Launch]) -> int:
    """Submit or, with ``launch=show``, print the runs of a sweep; return the exit code.

    Runs with the same launcher, cluster, environment and secrets share a job.
    """
    jobs = list[list[Launch]]()
    for launch in sweep:
        same = next((job for job in jobs if _get_job_key(job[0]) == _get_job_key(launch)), None)
        if same is None:
            jobs.append([launch])
        else:
            same.append(launch)
    if sweep[0].settings.config["launch"] == "show":
        return max(_print_plans([each.plan for each in job], job[0].settings) for job in jobs)
    return _submit_batches(jobs)


def _get_job_key(launch: Launch) -> tuple[object, ...]:
    """Return the properties that must match for runs to share a job."""
    plan, launcher = launch.plan, launch.settings.launcher
    return launcher, plan.cluster, dict(plan.environment), dict(plan.secrets), can_heal(plan.roles)


def _submit_batches(batches: Sequence[Sequence[Launch]]) -> int:
    """Submit each batch as one job; return the exit code.

    Raises:
        WorldsizeError: a batch is refused before any other was submitted; later refusals are logged.
    """
    submitted, logged, waited = list[RunDirectory](), list[RunDirectory](), list[RunDirectory]()
    waits, refused = list[Callable[[], None]](), 0
    for batch in batches:
        launcher = batch[0].settings.launcher
        assert isinstance(launcher, BatchLauncher)
        try:
            jobs = launcher.submit_all([each.plan for each in batch])
        except WorldsizeError as error:
            if not submitted:
                raise
            refused = 1
            _logger.error("failed to submit %s: %s", ", ".join(str(each.run.path) for each in batch), error)
            continue
        _note_jobs(jobs, batch)
        runs = [each.run for each in batch]
        submitted += runs
        logged += [each.run for each in batch if launcher.writes_logs(each.plan)]
        if launcher.wait:
            waited += runs
            waits.append(partial(wait_for, launcher, [job for job in jobs if job is not None]))
    for wait in waits:
        wait()
    if not waited:
        if logged:
            print(f"follow the logs with: {command_line('logs', '--follow', logged[0].path)}")
        return refused
    codes = [_show_result(run) for run in waited]
    if len(waited) > 1:
        ends = [
            read_run_end(run, code, number=number)
            for number, (run, code) in enumerate(zip(waited, codes, strict=True), 1)
        ]
        show_ends(Console(), ends)
    return max(*codes, refused)


def _note_jobs(jobs: Sequence[str | None], batch: Sequence[Launch]) -> None:
    """Record the jobs of submitted runs; print the start commands of runs without a job."""
    for job, launch in zip(jobs, batch, strict=True):
        if job is None:
            assert isinstance(launch.settings.launcher, BatchLauncher)
            print("resume the run with:" if complete(launch.run.checkpoints) else "start the run with:")
            print(launch.settings.launcher.describe(launch.plan))
            continue
        print(f"job {job} submitted: {launch.run.path}", flush=True)
        with wrap_write_errors(launch.run):
            note_job(launch.run, job)


def _show_result(run: RunDirectory) -> int:
    """Show the result of a run trained by a job; return its exit code."""
    ended = refresh_run(run)
    if ended.exit_reason == "completed":
        show_summary(Console(), read_result(run), run.path)
        return 0
    if ended.failure:
        _logger.error("%s", ended.failure)
    _logger.error("%s; see: %s", ended.exit_reason or "never started", command_line("logs", run.path))
    return int(ended.attempts[-1]["exit_code"] or 1) if ended.attempts else 1


def resume_run(
    cfg: DictConfig,
    record: RunRecord,
    words: Sequence[str],
    ignore: Sequence[str],
    *,
    start: int | None = None,
    skip: Sequence[str] = (),
) -> int:
    """Resume a run with overrides ``words``; return the exit code.

    Args:
        cfg: The configuration composed from ``words``.
        record: The record of the run.
        words: All overrides of the run.
        ignore: Keys that may differ from the record.
        start: Step of the checkpoint to go back to; 0: the start. None: the newest checkpoint.
        skip: Further samples to skip, such as "12000:12064".

    Raises:
        WorldsizeError: the configuration is invalid, the configuration or the data differs from the record in keys not
            in ``ignore``, the run is already past the requested number of steps, or samples would be skipped that the
            checkpoint has used.
    """
    outlive_output()
    run = record.directory
    rewind = plan_rewind(record, cfg, start=start, skip=skip)
    if rewind is not None:
        values: dict[str, object] = {"skip_samples": rewind.skipped.words}
        if cfg.checkpoint.ignore_until is not None:
            values["checkpoint.ignore_until"] = rewind.step
        cfg, words = override_values(cfg, values), replace_skipped_samples(words, rewind.skipped)
    settings = build_checked_settings(cfg)
    clean = create_scrubber(cfg, settings.config)
    plan = add_secrets(settings.config, settings.create_plan(run.path), clean)
    settings.launcher.check(settings.cluster)
    check_same(settings, record, clean, ignore)
    launcher = settings.launcher
    remote = isinstance(launcher, BatchLauncher) and not launcher.shares_run_folder
    if remote and sorted(clean.scrub_arguments(words)) != sorted(record.manifest["overrides"]):
        raise ConfigError(
            f"a run of {type(launcher).__name__} can only be resumed with its original options, since the run folder "
            "is not on this machine. Remove the new options, or start a new run; nothing was started."
        )
    if remote and rewind is not None:
        raise ConfigError(
            f"a run of {type(launcher).__name__} cannot go back to another step from here, since the run folder is not "
            "on this machine. Start a new run with skip_samples; nothing was started."
        )
    step = _find_step(run) if rewind is None else rewind.step
    if rewind is not None and not step and settings.initial:
        check_initial(settings.initial, record.manifest.get("init_from"))
    _check_steps(settings, step)
    check_skipped(settings, record, step)
    folder = None
    if rewind is not None:
        folder = rewind.put_aside(run)
        _logger.warning("%s", rewind.describe(folder))
    amend_record(settings, plan, record, clean, words, rewind=(rewind, folder) if rewind is not None else None)
    run.rewind.unlink(missing_ok=True)
    if not isinstance(launcher, Launcher):
        record.close()  # the job or the first host's agent acquires the lock
    return _start_run(settings, plan, run, nullcontext(record)).exit_code


def _find_step(run: RunDirectory) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return max(map(parse_step, complete(run.checkpoints)), default=0)


def _check_steps(settings: Settings, step: int) -> None:
    """Check that the run can continue after ``step``."""
    check_resumes(settings.recipe, step, exact=settings.determinism.exact_mode)
    if step > settings.training.steps:
        raise ConfigError(
            f"the run has completed {step} steps, more than steps={settings.training.steps}. "
            "Set a larger number of steps; nothing was started."
        )
