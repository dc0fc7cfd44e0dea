"""Weights & Biases, from rank 0 of a run.

wandb's import takes a second: it is left to the process that logs, for which no step waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, StepDone, Straggling, logged_name
from worldsize.observe.events import described

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
        from worldsize.observe.wandb_run import start

        facts = {"project": project, "id": run_id, "name": run_id, "group": group, "dir": folder}
        self._run = start(mode, **facts, config={**config, "manifest": _facts(manifest)})
        if self._run.settings.mode != "disabled":
            _logger.info("wandb: %s", _place(self._run))

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                self._run.log({f"train/{name}": value for name, value in event.figures().items()}, step=event.step)
            case Evaluated(step=step, metrics=metrics):
                self._run.log({logged_name(name): value for name, value in metrics.items()}, step=step)
            case Straggling(rank=rank):
                self._run.alert(f"rank {rank} is slow", described(event), level="WARN")
            case RunEnded(exit_reason="preempted"):
                self._run.mark_preempting()
                self._run.finish(exit_code=1)
            case RunEnded(summary=summary):
                self._run.summary.update({key: value for key, value in summary.items() if key != "metrics"})
                self._run.finish(exit_code=0)
            case RunFailed():
                self._run.finish(exit_code=1)


def _place(run: wandb.Run) -> str:
    return f"offline; upload it with: wandb sync {run.settings.sync_dir}" if run.offline else str(run.url)


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest says of the run beyond its configuration and its attempts."""
    return {key: value for key, value in manifest.items() if key not in ("config", "attempts", "results")}
