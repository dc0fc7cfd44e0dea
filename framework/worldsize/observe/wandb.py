"""Weights & Biases logger for rank 0 of a run.

Importing wandb takes a second, so only the logging process imports it and steps do not wait for it.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from worldsize.core import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunFailed,
    StepDone,
    format_logger_name,
    is_loss,
    metric_key,
    parse_metric_key,
)
from worldsize.observe.events import alert_for
from worldsize.observe.health.files import NodesHealth, health_figures

if TYPE_CHECKING:
    import wandb

Mode = Literal["auto", "online", "offline", "disabled"]
_AXES = ("samples", "tokens", "epoch")  # step metrics usable as x-axis for evaluations
_logger = logging.getLogger(__name__)


@final
class WandbListener:
    """Logs a run to one wandb run with the same id, also across restarts.

    Args:
        project: Project of the run.
        mode: "auto" is online if wandb finds a key (WANDB_API_KEY, or netrc after ``wandb login``) and WANDB_MODE does
            not override it; otherwise offline.
        entity: User or team of the project. None for the key's owner.
        name: Name shown for the run. None for its id.
        tags: Tags of the run.
        notes: Notes about the run.
        job_type: Kind of job, such as "train" or "ablation".
        checkpoints: Whether to upload each complete checkpoint as an artifact.
        run_id: Id of the run.
        group: Group of the run.
        config: The configuration, without secrets.
        manifest: The run's manifest, without secrets.
        folder: The run folder.
    """

    def __init__(
        self,
        *,
        project: str,
        mode: Mode,
        entity: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        job_type: str | None = None,
        checkpoints: bool = False,
        run_id: str,
        group: str | None,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        folder: Path,
    ) -> None:
        facts = {"project": project, "entity": entity, "id": run_id, "name": name or run_id, "group": group}
        words = {"tags": list(tags), "notes": notes, "job_type": job_type, "dir": folder}
        options = {f"{group}_name": option for group, option in manifest.get("options", {}).items()}
        self._health, self._checkpoints, self._axes = NodesHealth(folder), checkpoints, dict[str, float]()
        self._best, self._defined = _find_directions(config), set[str]()
        self._run = _start_run(
            mode, **facts, **words, config={**config, **options, "manifest": _select_metadata(manifest)}
        )
        if not self._run.offline and self._run.settings.mode != "disabled":
            _logger.info("wandb: %s", self._run.url)

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                figures = {f"train/{name}": value for name, value in event.collect_log_values().items()}
                self._axes = {
                    name: figures[name] / event.step for axis in _AXES if (name := f"train/{axis}") in figures
                }
                self._log_figures({**figures, **health_figures(self._health.read_new_samples())}, step=event.step)
            case Evaluated(step=step, metrics=metrics):
                axes = {name: each * step for name, each in self._axes.items()}
                self._log_figures(
                    {**axes, **{format_logger_name(name): value for name, value in metrics.items()}}, step=step
                )
            case CheckpointSaved(step=step, path=path) if self._checkpoints:
                self._upload_checkpoint(path, step)
            case RunEnded(exit_reason="preempted"):
                self._run.mark_preempting()
                self._run.finish(exit_code=1)
            case RunEnded(summary=summary):
                self._run.summary.update({key: value for key, value in summary.items() if key != "metrics"})
                self._run.finish(exit_code=0)
            case RunFailed():
                self._run.finish(exit_code=1)
        if alert := alert_for(event):
            self._run.alert(alert.title, alert.text, level="ERROR" if alert.is_error else "WARN")

    def _log_figures(self, figures: Mapping[str, float], *, step: int) -> None:
        """Log ``figures``. wandb's summary has the best value of each loss and objective.

        In a wandb sweep, it has last values only, since the sweep reads them by their plain names.
        """
        for name in figures.keys() - self._defined if self._run.sweep_id is None else ():
            best = "min" if is_loss(name) else None
            if best := self._best.get(name, best):
                self._run.define_metric(name, summary=f"{best},last")
            self._defined.add(name)
        self._run.log(dict(figures), step=step)

    def _upload_checkpoint(self, path: Path, step: int) -> None:
        """Pass a copy of the checkpoint to wandb's own process, which uploads it."""
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-checkpoint", type="model", metadata={"step": step})
        try:
            artifact.add_dir(str(path), skip_cache=True)
        except (OSError, ValueError) as error:
            _logger.warning("failed to upload the checkpoint of step %d: %s", step, error)
            return
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])


def _find_directions(config: Mapping[str, Any]) -> dict[str, Literal["min", "max"]]:
    """Map the logged name of each objective to "min" or "max", whichever is better."""
    keep = (config.get("checkpoint") or {}).get("keep") or {}
    goals = [
        (keep.get("best"), keep.get("direction")),
        *(
            (goal.get("metric"), goal.get("direction"))
            for key in ("early_stopping", "sweep")
            if (goal := config.get(key))
        ),
    ]
    return {
        format_logger_name(metric_key(*parse_metric_key(metric))): "max" if direction.startswith("max") else "min"
        for metric, direction in goals
        if metric and direction
    }


def _start_run(mode: Mode, **facts: Any) -> wandb.Run:
    """Start a run. With "auto", fall back to an offline run if the server refuses it.

    Raises:
        wandb.Error: the run could not be started, and there is no fallback.
    """
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # otherwise wandb requests the key's owner from the server: 5 s offline
    chosen = _choose_mode(mode)
    try:
        return _init_run(chosen, **facts)
    except wandb.Error as error:
        if mode != "auto" or chosen != "online":
            raise
        reason = str(error).splitlines()[0]
        _logger.warning("wandb is offline for this run: %s", reason)
        wandb.teardown()  # otherwise its service reports that the run's id is in use
        return _init_run("offline", **facts)


def _init_run(mode: Literal["online", "offline", "disabled"], **facts: Any) -> wandb.Run:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        # online: below the 30 s that an ending run waits; offline: init is slow only on a busy machine
        init_timeout=15.0 if mode == "online" else 120.0,
    )
    return wandb.init(mode=mode, resume="allow", save_code=False, settings=settings, **facts)


def _choose_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    import wandb

    if mode != "auto":
        return mode
    chosen = wandb.setup().settings.mode  # from WANDB_MODE or wandb's own settings
    if chosen in ("offline", "disabled"):
        return chosen
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def format_upload_command(folder: Path) -> str | None:
    """Return the shell command that uploads a run folder's offline wandb runs.

    Returns None if no offline run is left to upload. The path is relative to the working directory if that is shorter.
    """
    root = folder / "wandb"
    if all(any(path.glob("*.synced")) for path in root.glob("offline-run-*")):
        return None
    return f"wandb sync {shlex.quote(min(os.path.relpath(root), str(root), key=len))}/offline-run-*"


def _select_metadata(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest without its configuration, attempts and results."""
    return {key: value for key, value in manifest.items() if key not in ("config", "attempts", "results")}
