"""Access to recorded runs from scripts and notebooks: record, metrics, model, evaluation, comparison and report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, final

from worldsize.api.subprocesses import Ended, call_command
from worldsize.errors import RunFailedError, WorldsizeError, neighbours, require
from worldsize.record.json_lines import wrap_read_errors
from worldsize.record.run_directory import RunDirectory, find_run
from worldsize.record.run_record import RunView, refresh_run

if TYPE_CHECKING:  # slow or optional imports
    from pandas import DataFrame
    from torch import nn

    from worldsize.core import Recipe
    from worldsize.observe.summary import ShownComparison

Checkpoint = str | int  # "best", "last" or a step
EVENTS = ("step", "evaluation")  # in metrics.jsonl
_PLUGINS = "WORLDSIZE_PLUGINS"


def load(run: str | Path) -> Run:
    """Open a run by its folder or manifest; "last" is the newest run in ``runs``.

    Raises:
        WorldsizeError: The run does not exist, or its manifest is damaged.
    """
    return Run(find_run(run).path)


def report(runs: Sequence[Run | str | Path], output: str | Path | None = None) -> Path:
    """Write one HTML report about several runs, like ``worldsize report``; return its path.

    Args:
        runs: Runs, or their folders.
        output: The file to write; by default report.html in the common parent folder.

    Raises:
        WorldsizeError: The report cannot be written.
    """
    from worldsize.cli.report import write_report

    if not runs:
        raise WorldsizeError("report() requires at least one run. Pass ws.load('last').")
    folders = [_open_run(run).folder for run in runs]
    return write_report(folders, Path(output) if output else None)


def _open_run(run: Run | str | Path) -> Run:
    return run if isinstance(run, Run) else load(run)


@final
@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run; pass ``step`` to :meth:`Run.model` to load it.

    Attributes:
        step: The last step before the checkpoint.
        path: Folder of the checkpoint.
        metrics: Metrics of the evaluation after this step; empty if there was none.
        is_best: Whether this is the best checkpoint by ``checkpoint.keep.best``.
        is_last: Whether this is the newest checkpoint.
    """

    step: int
    path: Path
    metrics: Mapping[str, float]
    is_best: bool
    is_last: bool


@final
class Run:
    """A recorded run.

    Reading the record does not import code of the run. :meth:`model`, :meth:`evaluate` and :meth:`resume` run the
    recipe's code. For another user's run this requires ``trust=True``; the code is listed first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).resolve()
        self._directory = RunDirectory(self.folder)
        self._view  # noqa: B018 - raises an error if the folder is not a run

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.exit_reason or 'not started'}>"

    @property
    def _view(self) -> RunView:
        return refresh_run(self._directory)

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest: configuration, versions, cluster, attempts and results."""
        return self._view.manifest

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration, without secrets."""
        config: Mapping[str, Any] = self.manifest["config"]
        return config

    @property
    def exit_reason(self) -> str | None:
        """Exit reason of the last attempt, "running", or None before the first attempt."""
        return self._view.exit_reason

    @property
    def failure(self) -> str | None:
        """Cause of failure of the last attempt; None if it did not fail."""
        return self._view.failure

    @property
    def results(self) -> Mapping[str, Any]:
        """Results of the last attempt, such as ``metrics`` and ``state_digest``; empty while the run is active."""
        return self._view.results

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """Events of the run in order, such as checkpoints, alerts and failures."""
        from worldsize.observe.events import event_rows

        with wrap_read_errors(self.folder):
            return list(event_rows(self._directory.events))

    @property
    def checkpoints(self) -> Sequence[SavedCheckpoint]:
        """The complete checkpoints of the run, oldest first."""
        from worldsize.checkpoint.format import complete, parse_step
        from worldsize.launch.evaluate import read_retention

        folders, retention = complete(self._directory.checkpoints), read_retention(self._view)
        best = retention.find_best(folders) if retention else None
        metrics = {row["step"]: row["metrics"] for row in self.rows() if row["event"] == "evaluation"}
        return [
            SavedCheckpoint(step := parse_step(path), path, metrics.get(step, {}), path == best, path == folders[-1])
            for path in folders
        ]

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the logged steps and evaluations, one mapping per line of ``metrics.jsonl``."""
        from worldsize.record.metrics import metric_rows

        with wrap_read_errors(self.folder):
            return list(metric_rows(self._directory.metrics))

    def metrics(self, event: Literal["step", "evaluation"] | None = None) -> DataFrame:
        """Return the logged steps and evaluations, one per row; the column of a metric is ``metrics.NAME``.

        Args:
            event: Return only rows of this kind, and only their columns; None: all rows, with NaN in unused columns.

        Raises:
            WorldsizeError: pandas is not installed; :meth:`rows` works without it. Or ``event`` is unknown.
        """
        if event not in (None, *EVENTS):
            raise WorldsizeError(f"event={event!r} is not logged in metrics.jsonl{neighbours(event, EVENTS)}")
        require("Run.metrics()", "pandas", extra="notebook")
        import pandas

        return pandas.json_normalize([dict(row) for row in self.rows() if event in (None, row["event"])])

    def compare(self, other: Run | str | Path, *, tolerance: float = 0.01) -> ShownComparison:
        """Compare with another run, like ``worldsize compare``.

        Args:
            other: A run, or its folder.
            tolerance: The largest relative difference of a value that counts as within tolerance.

        Returns:
            The comparison, shown as a table. ``verdict`` is "bitwise identical", "within tolerance" or "different";
            ``metrics`` and ``tensors`` have ``name``, ``first_step``, ``absolute``, ``relative`` and ``ulp``.

        Raises:
            WorldsizeError: A record is damaged.
        """
        from worldsize.observe.summary import ShownComparison
        from worldsize.record.compare import compare_runs

        if not tolerance >= 0:
            raise WorldsizeError(f"tolerance={tolerance} must be at least 0.")
        comparison = compare_runs(self.folder, _open_run(other).folder, tolerance=tolerance)
        return ShownComparison(**vars(comparison))

    def model(self, checkpoint: Checkpoint = "last", *, averaged: bool = False, trust: bool = False) -> nn.Module:
        """Build the run's model with the weights of a checkpoint, in evaluation mode, on the CPU.

        Args:
            checkpoint: "best", "last" or a step.
            averaged: Whether to load the averaged weights (``ema.decay``).
            trust: Whether to allow running the code of another user's run.

        Raises:
            WorldsizeError: The checkpoint is missing or damaged, or the recipe is missing or not trusted.
        """
        from worldsize.checkpoint.format import read_checkpoint, verify_checkpoint
        from worldsize.checkpoint.weights import model_weights
        from worldsize.launch.evaluate import choose_checkpoint
        from worldsize.seeds import keep_generators

        saved = read_checkpoint(choose_checkpoint(self._view, str(checkpoint)))
        weights = model_weights(saved, averaged=averaged)
        with _project_of_run(), keep_generators():
            recipe = self._load_recipe(trust=trust)
            verify_checkpoint(saved)
            model = recipe.model()
        try:
            model.load_state_dict({name: weights.read_tensor(name) for name in weights.entries})
        except RuntimeError as error:
            raise WorldsizeError(f"the recipe's model does not match the checkpoint: {error}.") from None
        return model.eval()

    def evaluate(
        self, *words: str, checkpoint: Checkpoint = "last", split: str | None = None, trust: bool = False
    ) -> Mapping[str, float]:
        """Evaluate a checkpoint with ``worldsize evaluate`` and overrides such as "cluster.processes=2".

        Returns:
            The metrics by name.

        Raises:
            WorldsizeError: The evaluation is refused or fails.
        """
        from worldsize.files import read_regular
        from worldsize.strict_json import LARGEST, parse_strict_json

        self._check_importable("evaluate")
        chosen = [f"checkpoint={checkpoint}", *([f"split={split}"] if split else [])]
        ended = self._run_command("evaluate", *chosen, *words, *self._check_consent(trust=trust), has_result=True)
        assert ended.result is not None
        evaluation = parse_strict_json(read_regular(ended.result / "evaluation.json", at_most=LARGEST), finite=False)
        return dict(evaluation["metrics"])

    def export(
        self,
        output: str | Path | None = None,
        *,
        format: Literal["safetensors", "hf", "torch"] = "safetensors",
        checkpoint: Checkpoint = "last",
    ) -> Path:
        """Write the weights of a checkpoint for other programs with ``worldsize export``; return the path.

        Raises:
            WorldsizeError: The export is refused, such as ``format="hf"`` for another user's run.
        """
        named = [f"output={Path(output).absolute()}"] if output else []
        written = self._run_command("export", f"checkpoint={checkpoint}", f"--format={format}", *named)
        return Path(written.printed.splitlines()[-1])

    def report(self, output: str | Path | None = None) -> Path:
        """Write the HTML report; return its path. :func:`report` writes one about several runs.

        Raises:
            WorldsizeError: The report cannot be written.
        """
        return report([self], output)

    def resume(self, *words: str, trust: bool = False, **values: Any) -> Run:
        """Resume from the newest checkpoint, with overrides as words ("steps=2000") or keyword arguments.

        With ``trust``, another user's run may be resumed, and its code runs. Returns this run.

        Raises:
            WorldsizeError: The resume is refused or fails.
        """
        self._check_importable("resume")
        self._run_command("resume", *add_keywords(words, values), *self._check_consent(trust=trust))
        return self

    def _load_recipe(self, *, trust: bool) -> Recipe:
        from worldsize.config.recorded import read_recipe

        view = self._view
        if view.is_own:
            sys.path[:0] = [str(view.directory.plugins), *view.manifest["config"]["run"]["import_path"]]
            return read_recipe(view)
        from worldsize.config.compose import compose_only, resolve_config
        from worldsize.config.composed import build_settings
        from worldsize.launch.recorded_run import build_run_options, check_before_start, enter_project

        self._check_consent(trust=trust)
        words = enter_project(view, [], yes=True)
        sys.path[:0] = [str(view.directory.plugins), str(Path.cwd())]  # plugins: verified copies
        cfg = compose_only([*words, *build_run_options(view)])
        check_before_start(view.manifest, resolve_config(cfg), [], yes=True)
        return build_settings(cfg).recipe

    def _check_consent(self, *, trust: bool) -> list[str]:
        """Return the flags that let commands run another user's code; raise an error without ``trust``."""
        if not trust and not self._view.is_own:
            raise WorldsizeError(
                f"{self.folder} was written by another user or on another machine, and this call would run its code. "
                "Inspect the folder, then pass trust=True."
            )
        return ["--yes"] if trust else []

    def _check_importable(self, deed: str) -> None:
        target = str(self.config["recipe"].get("_target_"))
        if target.startswith("__main__."):
            raise WorldsizeError(
                f"cannot {deed} this run: its recipe {target.partition('.')[2]} is defined in __main__, not in a "
                "module. Use the run's record, model and weights, or move the class to a file (worldsize new recipe "
                "NAME)."
            )

    def _run_command(self, name: str, *words: str, has_result: bool = False) -> Ended:
        if flags := [word for word in words if word.startswith("-") and word != "--yes" and "--format=" not in word]:
            raise WorldsizeError(f"{flags[0]}: flags are not supported here. Use the command worldsize {name}.")
        ended = call_command(name, str(self.folder), *words, has_result=has_result)
        if ended.code:
            raise RunFailedError(ended.messages, self.folder)
        return ended


def add_keywords(words: Sequence[str], values: Mapping[str, Any]) -> Sequence[str]:
    """Return ``words`` with an override for each keyword argument in ``values``."""
    if not values:
        return words
    from worldsize.config.compose import format_keywords

    return [*words, *format_keywords(values)]


@contextmanager
def _project_of_run() -> Iterator[None]:
    """Restore the working directory, the import path, and the modules of recipes and plugins after the block.

    Different runs may have different code under one module name, and must not import each other's code.
    """
    before, path, plugins = Path.cwd(), [*sys.path], os.environ.get(_PLUGINS)
    modules = _take_modules()
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.pop(_PLUGINS, None)
        if plugins is not None:
            os.environ[_PLUGINS] = plugins
        _take_modules()
        sys.modules.update(modules)


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in ("recipes", "plugins")]
    return {name: sys.modules.pop(name) for name in names}
