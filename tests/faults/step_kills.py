"""Runs that lose a process at each of several points inside a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PROCESSES = 12
POINTS = (
    *("step:data", "step:compute", "step:forward", "step:backward", "step:reduce", "step:reduced"),
    *("log:begin", "log:end", "step:update", "step:updated"),
)
STRATEGIES = {
    "ddp": ("recipe=remembering", "strategy=ddp"),
    "zero": ("recipe=remembering", "strategy=zero"),
    "hsdp": ("recipe=remembering", "strategy=hsdp", "strategy.shard=2"),
    "fsdp": ("recipe=remembering", "strategy=fsdp"),
    "mesh": ("recipe=stateful", "strategy=mesh", "strategy.pipeline=2"),
}
OPTIONS = (
    *("reproducibility=elastic", f"logical_ranks={PROCESSES}", "steps=33", "log_every=3", "evaluate_every=13"),
    *("ema.decay=0.9", "checkpoint.every=0", "checkpoint.at_end=false", "cluster.threads=1", "logger=none"),
)
SAME = ("state_digest", "metrics_digest", "metrics", "samples")


def undisturbed(strategy: str) -> list[str]:
    """Return the options of a run of one process."""
    return [*OPTIONS, STRATEGIES[strategy][0], "strategy=single", "cluster.processes=1"]


def disturbed(strategy: str, kills: Sequence[str], *, restarts: int = 0) -> list[str]:
    """Return the options of a run that loses a process at each of these points, one in three steps."""
    healing = [f"cluster.processes={PROCESSES}", "strategy.on_failure=heal", f"launcher.max_restarts={restarts}"]
    return [*OPTIONS, *STRATEGIES[strategy], *healing, kills_at(kills)]


def kills_at(kills: Sequence[str]) -> str:
    """Return the faults that kill ranks 3, 0, 1, 2, 4 and so on, each at one of ``kills``.

    A log is exchanged in every third step. Other kills are in the step before, when sums of metrics are pending.
    """
    ranks = [3, *(rank for rank in range(PROCESSES) if rank != 3)]
    rows = [
        f'{{action: kill, rank: {rank}, step: {3 * place + (3 if "log:" in point else 2)}, point: "{point}"}}'
        for place, (rank, point) in enumerate(zip(ranks, kills, strict=False))
    ]
    return f"faults=[{', '.join(rows)}]"


def lost(manifest: dict[str, Any]) -> int:
    """Return how many processes died in the memberships of a run."""
    return sum(len(each["lost"]) for attempt in manifest["attempts"] for each in attempt.get("memberships", ()))
