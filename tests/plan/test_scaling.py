"""A scaling study of runs at several world sizes matches arithmetic by hand."""

from __future__ import annotations

import pytest

from worldsize.plan.scaling import (
    Point,
    boundary_text,
    compute_spread,
    efficiencies,
    find_knees,
    marginal_text,
    marginals,
    predict_efficiencies,
    summarize_timing,
)


def point(size: int, rate: float, *, strategy: str = "ddp", accumulation: int = 1) -> Point:
    return Point(strategy, size, accumulation, 100 / rate, 0.0, {}, rate, 90 / rate, "run")


def test_a_step_is_as_long_as_on_its_slowest_rank_and_warm_up_does_not_count() -> None:
    line = {"data_seconds": 0.1, "compute_seconds": 0.2, "communication_seconds": 0.3, "update_seconds": 0.1}
    slow = [{**line, "step": step, "step_seconds": 0.9 if step < 2 else 0.6 + step / 100} for step in range(10)]
    quick = [{**line, "step": step, "step_seconds": 0.6, "data_seconds": 0.0} for step in range(12)]
    timing = summarize_timing([quick, slow])
    assert timing.step_seconds == pytest.approx(0.7 + 0.055)  # steps 2 to 9: 0.72 to 0.79
    assert timing.spread_seconds == pytest.approx(0.045)
    assert timing.phases == pytest.approx({"data": 0.05, "compute": 0.2, "communication": 0.3, "update": 0.1})
    assert summarize_timing(
        [[{"step": step, "step_seconds": 1.0, "data_seconds": 0.5} for step in range(5)]]
    ).phases == {"data": 0.5}
    assert compute_spread([1.0, 2.0, 3.0]) == 2.0


def test_efficiency_is_throughput_a_process_against_one_process() -> None:
    points = [point(1, 100), point(2, 150), point(4, 200), point(2, 120, strategy="fsdp")]
    assert efficiencies(points) == [1.0, 0.75, 0.5, 0.6]
    without_one = [point(4, 200), point(2, 160)]
    assert efficiencies(without_one) == [0.625, 1.0]
    assert points[0].error == pytest.approx(-0.1)


def test_the_knee_is_where_efficiency_times_speedup_is_largest() -> None:
    """Amdahl's law with a serial share f has the largest S²/n at n = (1 − f) / f."""
    rates = {n: 100 / (0.2 + 0.8 / n) for n in (1, 2, 4, 8, 16)}
    points = [point(n, rate) for n, rate in rates.items()]
    points += [point(n, 100, strategy="stuck") for n in (1, 2, 4)]
    points += [point(8, rates[4], accumulation=4)]
    assert find_knees(points) == {"ddp": 4, "stuck": 1}


STAIRS = [  # rates at 1 × 1, 1 × 2, 2 × 2 and 4 × 2: good inside a node, and a drop at its boundary
    Point("ddp", size, 1, 100 / rate, 0.0, {}, rate, 100 / predicted, "run", nodes)
    for nodes, size, rate, predicted in ((1, 1, 100, 100), (1, 2, 180, 200), (2, 4, 220, 240), (4, 8, 300, 320))
]


def test_a_further_process_adds_its_share_of_the_speed_of_one() -> None:
    assert marginals(STAIRS) == pytest.approx([None, 0.8, 0.2, 0.2])
    assert marginals(STAIRS[::-1]) == pytest.approx([0.2, 0.2, 0.8, None])
    on_one_node = Point("ddp", 4, 1, 100 / 320, 0.0, {}, 320, None, "run", 1)
    assert marginals([*STAIRS, on_one_node])[-1] == pytest.approx(0.7)
    assert marginals([*STAIRS, on_one_node])[3] == pytest.approx(-0.05), "against the fewest nodes of that size"


def test_a_further_process_is_compared_with_those_of_its_own_strategy() -> None:
    slower = [point(1, 50, strategy="fsdp"), point(2, 90, strategy="fsdp")]
    assert marginals([*STAIRS, *slower])[-2:] == pytest.approx([None, 0.8])


def test_the_knee_is_the_last_size_before_a_further_process_adds_too_little() -> None:
    assert [find_knees(STAIRS, least=least)["ddp"] for least in (0.1, 0.5, 0.9)] == [8, 2, 1]


def test_the_cliff_at_the_node_boundary_is_named_with_its_prediction() -> None:
    assert predict_efficiencies(STAIRS) == pytest.approx([1.0, 1.0, 0.6, 0.4])
    assert boundary_text(STAIRS) == [
        "ddp at the node boundary, 1 × 2 to 2 × 2: efficiency 90% to 55% (predicted 100% to 60%); "
        "each additional process adds 20% of the throughput of a single process."
    ]
    assert (marginal_text(-0.001), marginal_text(-0.05), marginal_text(None)) == ("0%", "-5%", "")
    assert boundary_text(STAIRS[:2]) == []
    assert predict_efficiencies([point(1, 100), STAIRS[1], Point("ddp", 4, 1, 1, 0, {}, 9, None, "run")]) is None
