"""The efficiency chart of a scaling study marks the boundary to several nodes, if there is a single one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worldsize.observe.report.scaling import read_study, study_charts


def _point(nodes: int, each: int) -> dict[str, Any]:
    speed = {"step_seconds": 0.1, "spread_seconds": 0.0, "samples_per_second": 960.0, "efficiency": 1.0}
    return {"strategy": "ddp", "world_size": nodes * each, "nodes": nodes, **speed}


@pytest.mark.parametrize(
    ("shapes", "boundary"),
    [
        (((1, 1), (1, 2), (2, 4)), 4.0),
        (((1, 1), (1, 4), (2, 1), (2, 4)), None),  # 2 processes on two nodes, and 4 on one
        (((1, 1), (1, 4), (2, 2)), None),
        (((1, 1), (1, 4)), None),
        (((2, 1), (2, 4)), None),
    ],
)
def test_the_upright_line_parts_one_node_from_several_or_is_not_there(
    tmp_path: Path, shapes: tuple[tuple[int, int], ...], boundary: float | None
) -> None:
    points = [_point(*shape) for shape in shapes]
    (tmp_path / "scaling.json").write_text(json.dumps({"schema": 1, "points": points}))
    study = read_study(tmp_path / "scaling.json")
    assert study.boundary == (None if boundary is None else pytest.approx(boundary))
    throughput, efficiency = study_charts(study)
    assert ("vertical line" in throughput.note, "vertical line" in efficiency.note) == (False, boundary is not None)
