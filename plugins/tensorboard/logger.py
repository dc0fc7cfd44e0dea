"""TensorBoard logger: writes metrics to event files with TensorBoard's own library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, RunStarted, StepDone, format_logger_name
from worldsize.errors import require
from worldsize.observe.events import Alert, alert_for

require("logger=tensorboard", "tensorboard", extra="tensorboard")


@final
class TensorBoard:
    """Writes to ``folder`` / ``folder_name``; the parent folders name the run in TensorBoard."""

    def __init__(
        self,
        *,
        folder_name: str,
        run_id: str,
        group: str | None,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self._folder = folder / folder_name
        self._config = config
        self._writer: Any = None
        self._step = 0  # last logged step
        self._early: list[Alert] = []  # alerts before the files are opened at the start of training

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self._open_files(first)
            case StepDone(step=step):
                self._step = step
                for name, value in event.collect_log_values().items():
                    self._writer.add_scalar(f"train/{name}", value, step)
            case Evaluated(step=step, metrics=metrics):
                for name, value in metrics.items():
                    self._writer.add_scalar(format_logger_name(name), value, step)
                self._writer.flush()
            case RunEnded() | RunFailed() if self._writer is not None:
                self._writer.close()
        if alert := alert_for(event):
            self._write_alert(alert)

    def _write_alert(self, alert: Alert) -> None:
        if self._writer is None:
            self._early.append(alert)
            return
        self._writer.add_text(f"alerts/{alert.key}", alert.text, alert.step or self._step)
        self._writer.flush()

    def _open_files(self, first: int) -> None:
        """Open the event files; when resuming after step ``first``, hide records of later steps."""
        from torch.utils.tensorboard import SummaryWriter  # slow import (seconds)

        self._writer = SummaryWriter(self._folder, purge_step=first + 1 if first else None)
        if first == 0:
            self._writer.add_text("config", _markdown(self._config))
        self._step = first
        while self._early:
            self._write_alert(self._early.pop(0))


def _markdown(config: Mapping[str, Any]) -> str:
    return "".join(f"    {key}: {value}\n" for key, value in config.items())
