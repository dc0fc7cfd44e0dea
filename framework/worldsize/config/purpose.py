"""The purpose of a run, chosen by the command: training, evaluating a checkpoint, or examining the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_WITHOUT_TRAINING: Mapping[str, object] = {  # turns off features that only training uses
    **dict.fromkeys(
        ("logger", "autoscale", "profile.steps", "init_from", "cluster.min_processes", "profile.operations")
    ),
    "spike.factor": None,
    # these metrics may belong to a split that is not evaluated
    **dict.fromkeys(("checkpoint.keep.best", "early_stopping.metric", "sweep.metric", "schedule_metric")),
    "listeners": {},
    "faults": [],
    "observe.health.every": 0,
    "cluster.spares": 0,
    "cluster.spare_nodes": 0,
    "strategy.on_failure": "restart",
    "launcher.terminal_logs": False,
    "launcher.max_restarts": 0,
    "launcher.max_requeues": 0,
    "launcher.pod_restarts": 0,
    "launcher.restarts_on_errors": 0,
}


@dataclass(frozen=True)
class Train:
    """Training of the recipe, from the weights in ``initial`` (a run, a folder or a file) if given."""

    initial: Path | None = None

    def values(self) -> dict[str, object]:
        """Return the values to set in the configuration, by key; a launcher or strategy may lack some keys."""
        return {} if self.initial is None else {"init_from": str(self.initial)}


@dataclass(frozen=True)
class Evaluate:
    """Evaluation of the checkpoint on ``split``, or by default on the run's splits."""

    checkpoint: Path
    split: str | None = None

    def values(self) -> dict[str, object]:
        splits = {} if self.split is None else {"evaluation.splits": [self.split]}
        return {**_WITHOUT_TRAINING, **splits, "run.evaluates": str(self.checkpoint.resolve())}


@dataclass(frozen=True)
class Examine:
    """Examination of the hosts, and of links per tier or between all ``pairs`` of nodes.

    ``patience``: seconds to wait for a host's answer. ``nodes``: cluster settings that include spare nodes.
    """

    pairs: bool = False
    patience: float = 60.0
    nodes: Mapping[str, object] = field(default_factory=dict)

    def values(self) -> dict[str, object]:
        return {
            **_WITHOUT_TRAINING,
            **self.nodes,
            "run.examine": "pairs" if self.pairs else "tiers",
            "cluster.timeout": self.patience,
            "launcher.wait": True,
            "launcher.agents": True,
            "launcher.save_grace": 2 * self.patience,  # lets agents time out on a failed agent and still report
        }


Purpose = Train | Evaluate | Examine
TRAIN = Train()
