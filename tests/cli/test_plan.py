"""``worldsize plan`` is compared with the textbook and with arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from worldsize.cli.plan import node_table
from worldsize.collectives.cost import ring_all_reduce_seconds, ring_payload_bytes
from worldsize.core import Cluster, Link, Workload
from worldsize.observe.report.page import render_page
from worldsize.plan.advice import size_text
from worldsize.record.manifest import write_manifest
from worldsize.strategies.ddp import DDP

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]
STRATEGIES = [path for root in ("conf", "plugins/*/conf") for path in REPOSITORY.glob(f"{root}/strategy/*.yaml")]
TEXTBOOK = ("--model-size", "1e9", "--precision", "fp16", "--compute", "250ms", "+cluster=slurm", "batch_size=64")


@pytest.fixture
def plan(command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]) -> Any:
    def run(*words: str) -> Any:
        return command("plan", *words, cwd=tmp_path, environment=environment_without_wandb)

    return run


def rows(output: str, *, columns: int = 9) -> dict[str, list[str]]:
    """Return the cells of the table with this many columns (the strategies), keyed by the first cell of each row."""
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == columns}


@pytest.mark.parametrize(
    ("nodes", "per_node", "expected"),
    [
        (1, 8, ["8.00 GB *", "3.50 GB", "0 B", "11.68 ms", "11.68 ms", "261.68 ms", "95.5%", "46.72 ms"]),
        (8, 1, ["8.00 GB *", "3.50 GB", "3.50 GB", "280.07 ms", "280.07 ms", "530.07 ms", "47.2%", "1120.28 ms"]),
    ],
)
def test_the_costs_of_a_billion_parameters_on_eight_gpus_are_the_textbooks(
    plan: Any, nodes: int, per_node: int, expected: list[str]
) -> None:
    size = (f"cluster.nodes={nodes}", f"cluster.gpus_per_node={per_node}")
    done = plan(*TEXTBOOK, *size, "--strategies", "single,fsdp,ddp")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["ddp"] == expected
    assert table["fsdp"][0] == "1.00 GB *"
    assert "single: strategy=single requires cluster.processes=1, got 8." in done.stdout
    assert set(table) == {"ddp", "fsdp"}


def test_every_strategy_is_predicted_or_the_plan_says_why_not(plan: Any) -> None:
    done = plan(*TEXTBOOK, "cluster.nodes=1", "cluster.gpus_per_node=8")
    assert done.returncode == 0, done.stderr
    others = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert {path.stem for path in STRATEGIES} <= {*rows(done.stdout), *others}


def test_a_model_is_planned_for_four_thousand_processes_under_strategies_with_other_numbers_of_workers(
    plan: Any,
) -> None:
    size = ("cluster.nodes=512", "cluster.processes_per_node=8", "cluster.device=cpu")
    words = (*size, "strategy=parameter_server", "strategy.servers=7")
    done = plan(*TEXTBOOK[:-1], *words, "--strategies", "ddp,parameter_server")
    assert done.returncode == 0, done.stderr
    assert set(rows(done.stdout)) == {"ddp", "parameter_server"}
    assert "4096 processes on 512 nodes" in done.stdout


def test_options_of_the_chosen_strategy_change_its_prediction(plan: Any) -> None:
    words = (*TEXTBOOK, "cluster.nodes=8", "cluster.gpus_per_node=8", "strategy=ddp", "--strategies", "ddp")
    flat = rows(plan(*words).stdout)["ddp"]
    by_node = rows(plan(*words, "strategy.reduce=hierarchical", "strategy.compress=int8").stdout)["ddp"]
    assert flat[2] == "3.94 GB"  # 2 · 63/64 · 2 GB
    assert by_node[2] == "878.42 MB"  # 2 · 7/8 · 2 GB · (1/4 + 1/1024)
    assert flat[3] == "315.63 ms"
    # inside: 14 µs + 2 · 7/8 · 2 GB / 300 GB/s; across: 70 µs + 878.42 MB / 12.5 GB/s
    assert by_node[3] == f"{0.014 + 11.6667 + 0.07 + 70.2734:.2f} ms"


def test_a_rule_for_the_learning_rate_is_explained_once_and_refuses_no_strategy(plan: Any) -> None:
    size = ("cluster.nodes=1", "cluster.gpus_per_node=8", "strategy=local_sgd", "cluster.scale_lr=linear")
    done = plan(*TEXTBOOK, *size, "--strategies", "ddp,local_sgd")
    assert done.returncode == 0, done.stderr
    assert set(rows(done.stdout)) == {"ddp", "local_sgd"}
    before, _, after = done.stdout.partition("8 processes on 1 nodes")
    assert "cluster.scale_lr=linear requires cluster.base_batch" in before
    assert "cluster.scale_lr" not in after


def test_a_recipe_is_calibrated_by_a_few_steps(plan: Any, tmp_path: Path) -> None:
    done = plan("recipe=digits", "cluster.processes=2", "--strategies", "ddp,fsdp")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["ddp"][0].endswith(" MB")
    assert min(float(table[name][5].removesuffix(" ms")) for name in ("ddp", "fsdp")) > 0
    assert "Global batch: 96 samples per step, 2 × 48.\nLinks (declared by cluster=laptop): " in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_plan_uses_measured_links_the_devices_memory_and_the_batch_of_the_last_run(plan: Any, tmp_path: Path) -> None:
    measured = {"schema": 1, "links": {"network": {"bandwidth": 1.25e9, "latency": 1e-5}}}
    (tmp_path / "doctor.json").write_text(json.dumps(measured))
    before = tmp_path / "runs" / "digits" / "2026-01-02_030405_abcdef"
    before.mkdir(parents=True)
    write_manifest(before / "run_manifest.json", {"config": {"batch_size": 16}, "attempts": []})
    words = ("cluster.nodes=8", "cluster.gpus_per_node=1", "cluster.device_memory=7e9", "cluster.price_per_hour=3")
    fails = "cluster.mtbf_hours=1000"  # an older run is skipped if its record lacks a compared setting
    done = plan("--links", "doctor.json", *TEXTBOOK, *words, fails, "--strategies", "ddp,fsdp")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("│ ddp ")]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    step = 0.250 + 2 * 7 / 8 * 2e9 / 1.25e9 + 14 * 1e-5
    assert (cells[1], cells[6]) == ("8.00 GB * ✗", f"{1e3 * step:.2f} ms")
    assert cells[9] == f"{step / 3600 * 24 / 64 * 1e6:.2f}"  # eight nodes at 3 an hour, 64 samples a step
    assert "ddp: out of memory: requires 8.00 GB per rank, found 7.00 GB." in done.stdout
    assert "Best: fsdp, " in done.stdout
    assert "Assumed: network" not in done.stdout
    assert "Retune" not in done.stderr, "the run had a different model"
    done = plan("--compute", "1s", "cluster.processes=2", "batch_size=64", "--strategies", "ddp")
    assert "the global batch changed from 16 in runs/digits/2026-01-02_030405_abcdef to 64" in done.stderr
    assert "start at 4 × with SGD, 2 × with Adam" in done.stderr


def test_a_plan_says_when_the_run_ends_on_nodes_that_fail_beside_what_a_run_then_took(
    plan: Any, train: Any, tmp_path: Path
) -> None:
    ran = train("recipe=digits", "steps=40", "cluster.processes=2", "checkpoint.every=auto", "run.name=before")
    assert ran.code == 0, ran.error
    words = ("recipe=digits", "steps=40", "cluster.processes=2", f"run.root={ran.folder.parents[1]}")
    declared = (
        "cluster.price_per_hour=3",
        "cluster.spot_market.price_per_hour=1",
        "cluster.spot_market.mtbf_hours=0.01",
    )
    done = plan(*words, *declared, "cluster.mtbf_hours=1e6", "--strategies", "ddp", "--restart", "2s", "--save", "10ms")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout, columns=8)
    assert (table["these nodes"][0], table["these nodes"][2]) == ("41,666.7 days", "0.0")
    assert table["spot"][0] == "36 s"
    assert table["before took"][2] == "0"
    assert table["before took"][3].removesuffix(" s") == f"{ran.json('result.json')['goodput']['total_seconds']:.3g}"
    assert "A save delays training by 0.01 s, and a restart takes 2 s." in done.stdout
    alone = plan(*words, "cluster.spot_market.price_per_hour=1")
    assert alone.returncode == 2
    assert "cluster.spot_market.price_per_hour has no effect without cluster.spot_market.mtbf_hours" in alone.stderr


def test_thousands_of_ranks_are_a_short_table() -> None:
    cluster = Cluster("test", 512, 4096, "cuda", "nccl", links={"network": Link(12.5e9, 5e-6)})
    table = node_table(cluster, {"data": [list(range(4096))]})
    nodes = [*range(8), None, *range(504, 512)]
    ranks = ["..." if node is None else f"{8 * node}-{8 * node + 7}" for node in nodes]
    assert list(table.columns[0].cells) == ranks
    cost = DDP().cost(Workload(2e9, 4e9, compute_seconds=0.25), cluster)
    assert cost is not None
    assert cost.communication_seconds == pytest.approx(2 * (4095 / 4096 * 2e9 / 12.5e9 + 4095 * 5e-6))


def test_ranks_above_sixteen_are_listed_only_on_request(plan: Any) -> None:
    words = (*TEXTBOOK, "cluster.nodes=4", "cluster.gpus_per_node=8", "--strategies", "ddp")
    short, listed = plan(*words).stdout, plan(*words, "--ranks").stdout
    assert rows(short, columns=4) == {
        f"{8 * node}-{8 * node + 7}": [str(node), "0-7", "0 1 .. 31"] for node in range(4)
    }
    assert list(rows(listed, columns=4)) == [*map(str, range(32))]
    assert "Pass --ranks" in short
    assert "Pass --ranks" not in listed


def test_assumptions_are_named_unless_they_are_given(plan: Any, tmp_path: Path) -> None:
    sized = ("--model-size", "1e9", "--compute", "250ms", "--strategies", "ddp", "cluster.gpus_per_node=8")
    words = (*sized, "+cluster=slurm", "cluster.nodes=8")
    lines = [line for line in plan(*words).stdout.splitlines() if line.startswith("Assumed: ")]
    overlap, precision, network = lines
    assert "overlap=0%" in overlap
    assert "--overlap 0.6" in overlap
    assert "precision=fp32, 4 bytes" in precision
    assert "network bandwidth=12.50 GB/s per node (conf/cluster/slurm.yaml)" in network
    assert "Set cluster.links.network.bandwidth" in network
    given = ("--overlap", "0", "--precision", "fp32", "cluster.links.network.bandwidth=12.5e9")
    assert "Assumed" not in plan(*words, *given).stdout
    assert "Assumed: node bandwidth=300.00 GB/s per process" in plan(*words[:-1], "cluster.nodes=1").stdout
    curve = plan(*words[:-1], "cluster.nodes=1..2").stdout
    assert [line for line in curve.splitlines() if line.startswith("Assumed: ")] == lines
    own = tmp_path / "conf" / "cluster" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((REPOSITORY / "conf" / "cluster" / "slurm.yaml").read_text())
    assert "Assumed: network" not in plan(*sized, "cluster.nodes=8", "+cluster=own").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they can be timed")
def test_step_times_of_gpus_that_this_machine_lacks_must_be_given(plan: Any) -> None:
    words = ("recipe=digits", "+cluster=slurm", "cluster.gpus_per_node=2", "logger=none", "--strategies", "ddp")
    refused = plan(*words)
    assert "Pass --compute, e.g. --compute 250ms." in " ".join(refused.stdout.split())
    assert (refused.returncode, "No strategy fits" in refused.stdout) == (2, False)
    assert float(rows(plan(*words, "--compute", "250ms").stdout)["ddp"][-3].removesuffix(" ms")) >= 250


def test_what_cannot_be_planned_is_refused(plan: Any) -> None:
    done = plan("--model-size", "1e9")
    assert (done.returncode, done.stderr) == (
        2,
        "--model-size requires --compute. Add e.g. --compute 250ms.\n",
    )
    assert "has no unit" in plan("--compute", "250").stderr
    assert "unknown strategy 'fdsp'; did you mean 'fsdp'?" in plan("--strategies", "ddp,fdsp").stderr


def test_a_curve_has_the_textbooks_figures_at_each_size_and_is_drawn(plan: Any, tmp_path: Path) -> None:
    words = ("cluster.nodes=1..64", "cluster.gpus_per_node=1", "strategy=ddp", "--knee", "0.43", "--study", "study")
    done = plan(*TEXTBOOK, *words)
    assert done.returncode == 0, done.stderr
    study = json.loads((tmp_path / "study" / "scaling.json").read_text())
    network = Link(12.5e9, 5e-6)
    for point, nodes in zip(study["points"], (1, 2, 4, 8, 16, 32, 64), strict=True):
        exposed = ring_all_reduce_seconds(2e9, nodes, network)
        assert (point["nodes"], point["world_size"]) == (nodes, nodes)
        assert point["step_seconds"] == pytest.approx(0.25 + exposed)
        assert point["efficiency"] == pytest.approx(0.25 / (0.25 + exposed))
    assert "1120.28 ms" in done.stdout, "what a rank would have to compute for 80 % on eight"
    shares = [point["marginal"] for point in study["points"][1:]]
    assert shares[0] == pytest.approx(2 * study["points"][1]["efficiency"] - 1)
    assert study["knee"] == {"ddp": 1}
    assert "ddp: the knee is at 1 process: each additional process adds less than 43% of the throughput" in done.stdout
    assert "Predicted, not measured." in render_page([tmp_path / "study"])


def test_a_curve_has_the_sizes_that_fit_in_a_rack_and_those_that_racks_divide(plan: Any, tmp_path: Path) -> None:
    rack = "+cluster.tiers.rack={nodes: 4, bandwidth: 50e9, latency: 3e-6}"
    words = ("cluster.gpus_per_node=1", "strategy=ddp", rack, "--study", "study")
    done = plan(*TEXTBOOK, "cluster.nodes=1..10", *words)
    assert done.returncode == 0, done.stderr
    points = {each["nodes"]: each for each in json.loads((tmp_path / "study" / "scaling.json").read_text())["points"]}
    assert list(points) == [1, 2, 4, 8]
    assert "ddp, cluster.nodes=10: cluster.tiers.rack=4 must be a multiple of 1 (" in done.stdout
    for nodes in (2, 4):
        exposed = ring_all_reduce_seconds(2e9, nodes, Link(50e9, 3e-6))
        assert points[nodes]["step_seconds"] == pytest.approx(0.25 + exposed)


def test_the_payload_at_which_half_of_a_step_computes_is_that_of_the_formula(plan: Any) -> None:
    shape = ("--compute", "250ms", "+cluster=slurm", "cluster.nodes=8", "cluster.gpus_per_node=1")
    done = plan("--payload", *shape, "--strategies", "ddp,local_sgd", "strategy=ddp")
    assert done.returncode == 0, done.stderr
    payload = ring_payload_bytes(0.25, 8, Link(12.5e9, 5e-6))
    assert f"ddp: efficiency is at least 50% up to {size_text(payload)} of parameters" in done.stdout
    rare = ring_payload_bytes(8 * 0.25, 8, Link(12.5e9, 5e-6))  # every 8 steps
    assert f"local_sgd: efficiency is at least 50% up to {size_text(rare)} of parameters" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--payload",), "Add e.g. --compute 250ms, and remove --model-size."),
        (("cluster.nodes=8..1",), "expected one range of sizes, e.g. cluster.nodes=1..64, got cluster.nodes=8..1."),
        (("--study", "here"), "Add e.g. cluster.nodes=1..64."),
    ],
)
def test_sweeps_that_mean_nothing_are_refused(plan: Any, words: tuple[str, ...], message: str) -> None:
    done = plan("recipe=digits", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
