"""MLflow logger: writes metrics to a tracking server or database with the MLflow client."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from worldsize.core import Evaluated, Event, RunEnded, RunFailed, StepDone, format_logger_name
from worldsize.errors import require
from worldsize.observe.events import alert_for

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

require("logger=mlflow", "mlflow-skinny", extra="mlflow")

_TAG = "worldsize.run"  # tag with the run's id, which later attempts search for
_AT_ONCE = 100  # largest number of parameters per request that servers accept
_LONGEST = 500  # largest length of a parameter or tag that all servers accept, in characters


@final
class MLflow:
    """Logs to one MLflow run per run; later attempts continue it."""

    def __init__(
        self,
        *,
        tracking_uri: str | None,
        experiment: str,
        run_id: str,
        group: str | None,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        folder: Path,
    ) -> None:
        from mlflow import MlflowClient  # slow import (seconds)

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # otherwise it logs the creation of every table
        self._client = MlflowClient(tracking_uri=tracking_uri)
        place = _experiment(self._client, experiment)
        runs = self._client.search_runs([place], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        self._last = _last_steps(self._client, runs[0]) if runs else {}  # steps logged by earlier attempts
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {_TAG: run_id, "mlflow.source.git.commit": manifest["code"]["commit"], "worldsize.group": group}
        known = {name: value for name, value in tags.items() if value is not None}
        self._run = self._client.create_run(place, run_name=run_id, tags=known).info.run_id
        self._log_parameters(config)

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone(step=step):
                self._log_metrics({f"train/{name}": value for name, value in event.collect_log_values().items()}, step)
            case Evaluated(step=step, metrics=metrics):
                self._log_metrics({format_logger_name(name): value for name, value in metrics.items()}, step)
            case RunEnded(exit_reason="preempted"):
                self._client.set_terminated(self._run, status="KILLED")
            case RunEnded():
                self._client.set_terminated(self._run, status="FINISHED")
            case RunFailed():
                self._client.set_terminated(self._run, status="FAILED")
        if alert := alert_for(event):
            self._client.set_tag(self._run, f"worldsize.{alert.key}", alert.text[:_LONGEST])

    def _log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        if new:
            self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in new.items()])

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[:_LONGEST]) for key, value in _flatten_config(config)]
        for start in range(0, len(parameters), _AT_ONCE):
            self._client.log_batch(self._run, params=parameters[start : start + _AT_ONCE])


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the experiment's id, creating the experiment if needed."""
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment else client.create_experiment(name))


def _last_steps(client: MlflowClient, run: Run) -> dict[str, int]:
    """Return the last logged step of each metric of the run."""
    return {
        name: max(each.step for each in client.get_metric_history(run.info.run_id, name)) for name in run.data.metrics
    }


def _flatten_config(config: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield all values of a nested configuration with dotted keys such as ``strategy.reduce``."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten_config(value, (*path, str(key)))
        else:
            yield ".".join((*path, str(key))), value
