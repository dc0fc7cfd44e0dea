"""Weights & Biases, from rank 0 of a run.

wandb's import takes a second: it is left to the process that logs, for which no step waits.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, StepDone, logged_name
from worldsize.observe.events import alert_for
from worldsize.observe.health.files import NodesHealth, health_figures

if TYPE_CHECKING:
    import wandb

Mode = Literal["auto", "online", "offline", "disabled"]
_logger = logging.getLogger(__name__)


@final
class WandbListener:
    """Logs to one wandb run per run, kept across restarts by its id.

    ``mode="auto"``: online when wandb finds a key (WANDB_API_KEY, or netrc after ``wandb login``) and
    WANDB_MODE does not say otherwise, else offline.
    """

    def __init__(
        self,
        *,
        project: str,
        mode: Mode,
        run_id: str,
        group: str | None,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        folder: Path,
    ) -> None:
        facts = {"project": project, "id": run_id, "name": run_id, "group": group, "dir": folder}
        self._health = NodesHealth(folder)
        self._run = _start(mode, **facts, config={**config, "manifest": _facts(manifest)})
        if self._run.settings.mode != "disabled":
            _logger.info("wandb: %s", _place(self._run))

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                figures = {f"train/{name}": value for name, value in event.figures().items()}
                self._run.log({**figures, **health_figures(self._health.new())}, step=event.step)
            case Evaluated(step=step, metrics=metrics):
                self._run.log({logged_name(name): value for name, value in metrics.items()}, step=step)
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


def _start(mode: Mode, **facts: Any) -> wandb.Run:
    """Start a run; with "auto" one that no server takes is kept for ``wandb sync``.

    Raises:
        wandb.Error: the run could not be started, and is not one that "auto" chose to have online.
    """
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # else finding a key asks the server whose it is: 5 s offline
    chosen = _mode(mode)
    try:
        return _init(chosen, **facts)
    except wandb.Error as error:
        if mode != "auto" or chosen != "online":
            raise
        reason = str(error).splitlines()[0]
        _logger.warning("wandb is offline for this run: %s", reason)
        wandb.teardown()  # or its service says that the run's id is in use
        return _init("offline", **facts)


def _init(mode: Literal["online", "offline", "disabled"], **facts: Any) -> wandb.Run:
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        # a run that is asked to end at once waits 30 s for us; without a server only a busy machine takes long
        init_timeout=15.0 if mode == "online" else 120.0,
    )
    return wandb.init(mode=mode, resume="allow", save_code=False, settings=settings, **facts)


def _mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    import wandb

    if mode != "auto":
        return mode
    chosen = wandb.setup().settings.mode  # what WANDB_MODE or wandb's own settings say
    if chosen in ("offline", "disabled"):
        return chosen
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _place(run: wandb.Run) -> str:
    if not run.offline:
        return str(run.url)
    return f"offline; upload it with: {shlex.join(['wandb', 'sync', run.settings.sync_dir])}"


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest says of the run beyond its configuration and its attempts."""
    return {key: value for key, value in manifest.items() if key not in ("config", "attempts", "results")}
