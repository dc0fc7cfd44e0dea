"""Decides which figures of a node are worth an alert."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import final

from worldsize.core import HealthLimits, NodeAlert
from worldsize.observe.health.rows import HealthRow

_BACK = 0.95  # a figure has come back once it is below this share of its limit
_LASTING = ("swap", "temperature", "throttled")  # those that may pass by: two lines in a row must have them
_Key = tuple[str, int | None]


@final
class HealthAlerts:
    """Raises an alert when a figure of a node passes its limit, and again only if it has come back in between.

    Args:
        limits: The limits.
        node: Index of the node.
    """

    def __init__(self, limits: HealthLimits, node: int) -> None:
        self._limits, self._node = limits, node
        self._seen: set[_Key] = set()  # figures beyond their limit in the line before
        self._raised: set[_Key] = set()

    def judge(self, row: HealthRow) -> list[NodeAlert]:
        """Return the new alerts of the next line about the node."""
        beyond = {(each.what, each.gpu if each.rank is None else each.rank): each for each in self._beyond(row, 1.0)}
        still = {(each.what, each.gpu if each.rank is None else each.rank) for each in self._beyond(row, _BACK)}
        lasting = {key for key in beyond if key[0] not in _LASTING or key in self._seen}
        self._seen = set(beyond)
        new = lasting - {key for key in self._raised if key[0] != "ecc"}  # each error of a memory is news
        self._raised = (self._raised & still) | lasting
        return [beyond[key] for key in sorted(new, key=str)]

    def _beyond(self, row: HealthRow, share: float) -> Iterator[NodeAlert]:
        """Yield an alert for each figure that is beyond this share of its limit."""
        limits, largest = self._limits, _largest(row)
        for what, value, limit, detail in (
            ("memory", row["memory"], limits.memory, largest),
            ("swap", row["swap"], limits.swap, ""),
            ("disk", row["disk"], limits.disk, f"{row['disk_free'] / 1e9:,.1f} GB are free"),
            ("network", row["network_errors"], limits.network_errors, ""),
        ):
            if limit is not None and value > share * limit:
                yield NodeAlert(self._node, row["host"], what, value, limit, detail=detail)
        usable, needed = row.get("cpus"), limits.cpus
        # whoever starts more processes than a machine has CPUs wants it so; those that are bound to a part may not
        if usable and needed is not None and usable < min(needed, os.cpu_count() or needed):
            yield NodeAlert(self._node, row["host"], "cpus", usable, needed)
        bound = limits.process_memory
        for rank, size in row["resident"].items():
            if bound is not None and size > share * bound:
                yield NodeAlert(self._node, row["host"], "process_memory", size, bound, rank=int(rank))
        for gpu in row["gpus"]:
            index, heat = gpu["index"], gpu.get("temperature", 0.0)
            if limits.temperature is not None and heat > share * limits.temperature:
                yield NodeAlert(self._node, row["host"], "temperature", heat, limits.temperature, gpu=index)
            if gpu["slowed_by"]:
                yield NodeAlert(
                    self._node, row["host"], "throttled", 1, 0, gpu=index, detail=", ".join(gpu["slowed_by"])
                )
            if errors := gpu.get("ecc_errors", 0):
                yield NodeAlert(self._node, row["host"], "ecc", errors, 0, gpu=index)


def _largest(row: HealthRow) -> str:
    """Name the rank that holds most memory; empty if that is not known."""
    if not row["resident"]:
        return ""
    rank, size = max(row["resident"].items(), key=lambda each: each[1])
    return f"of its ranks, {rank} holds most: {size / 1e9:.2f} GB"
