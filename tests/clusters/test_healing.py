"""A gang on several hosts continues without dead hosts, and ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from worldsize.testing.hosts import Hosts

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]
DIGITS = ("recipe=digits", "recipe.width=4", "log_every=1", "checkpoint.every=0", "checkpoint.at_end=true")
LAYERS = ("recipe=stdlib_lm", "recipe.width=16", "recipe.depth=1", "recipe.heads=2", "recipe.context=16")
SHARED = (*LAYERS, "recipe.test_bytes=2000", "log_every=1", "checkpoint.every=0", "logical_tensor=2")
MESH = (*SHARED, "strategy=mesh", "strategy.tensor=2")
ELASTIC = ("reproducibility=elastic", "logical_ranks=8", "cluster.threads=1", "logger=none", "evaluate_every=50")
SLOW = "{action: sleep, rank: null, step: null, seconds: 0.05, attempt: null}"
SLOWER = SLOW.replace("0.05", "0.2")  # the same time then takes a quarter of the steps, and of their processor time


@pytest.fixture
def launch(four: Hosts, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path) -> Iterator[Any]:
    """``launch("steps=30")`` starts a healing run on four hosts, from the first.

    ``each``: processes per host; with 2 there are two hosts.
    """
    folder = tmp_path / "project"
    folder.mkdir()

    def start(*options: str, model: tuple[str, ...] = DIGITS, each: int = 1) -> subprocess.Popen[str]:
        hosts = ",".join(f"h{host + 1}" for host in range(4 // each))
        where = ("+cluster=ssh", f"cluster.hosts=[{hosts}]", f"cluster.processes_per_node={each}")
        own = (f"cluster.ssh=[{','.join(four.ssh)}]", f"cluster.python={warm_python}", f"cluster.folder={folder}/%h")
        words = (*model, *ELASTIC, "strategy.on_failure=heal", *where, *own, *options)
        return subprocess.Popen(
            four.wrap_command(1, [str(warm_python), str(REPOSITORY / "train.py"), *words]),
            cwd=folder,
            env=environment_without_wandb,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    yield start
    wait_until(lambda: not four.processes("worldsize agent"), lambda: four.processes("worldsize agent"))


@pytest.fixture
def undisturbed(reference_run: Any) -> Callable[..., str]:
    """``undisturbed("steps=30")`` is the digest of an undisturbed run on one process."""

    def run(*options: str) -> str:
        alone = reference_run(*DIGITS, *ELASTIC, "strategy=single", "cluster.processes=1", *options)
        return str(alone.json("result.json")["state_digest"])

    return run


def _host(rank: int) -> str:
    return f"h{rank % 4 + 1}"  # later ones are dealt to the hosts in the same way as the first ones


def ended(process: subprocess.Popen[str], root: Path, *, each: int = 1) -> tuple[str, str, list[list[int]]]:
    """Wait for the end; return the digest, the output, and the members of each membership of the only attempt."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    (path,) = root.rglob("run_manifest.json")
    (attempt,) = json.loads(path.read_text())["attempts"]
    digest = json.loads((path.parent / "result.json").read_text())["state_digest"]
    for membership in attempt["memberships"]:
        assert membership["hosts"] == [_host(rank // each) for rank in membership["members"]]
    return digest, output, [each["members"] for each in attempt["memberships"]]


def attempts(folder: Path) -> list[Any]:
    """Return the manifest's entry for each attempt of a run."""
    listed: list[Any] = json.loads((folder / "run_manifest.json").read_text())["attempts"]
    return listed


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    """Wait for a condition, and fail if the run exits first."""
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_a_killed_rank_costs_no_restart_and_no_bit(
    launch: Any, undisturbed: Callable[..., str], tmp_path: Path, strategy: str
) -> None:
    process = launch("steps=60", f"strategy={strategy}", "faults=[{action: kill, rank: 2, step: 20}]")
    digest, output, memberships = ended(process, tmp_path)
    assert memberships == [[0, 1, 2, 3], [0, 1, 3]], output
    assert "worker 2 failed: killed by SIGKILL; continuing without it" in output
    assert digest == undisturbed("steps=60")


def test_a_rank_that_is_started_again_joins_on_its_host(
    launch: Any, undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    process = launch("steps=40", "launcher.max_restarts=1", f"faults=[{{action: kill, rank: 3, step: 9}}, {SLOWER}]")
    digest, output, memberships = ended(process, tmp_path)
    assert memberships[-1] == [0, 1, 2, 3], output
    assert len(memberships) >= 2
    assert digest == undisturbed("steps=40")


@pytest.mark.slow
def test_the_others_go_on_without_a_host_whose_link_is_cut(
    four: Hosts, launch: Any, undisturbed: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    """Each host holds a quarter of the model and optimizer state, and a copy of a peer's quarter."""
    sharded = ("strategy=fsdp", "checkpoint.at_end=false")
    process = launch("steps=120", "launcher.node_timeout=6", f"faults=[{SLOW}]", *sharded)
    folder = begun(tmp_path / "project", after=8)
    four.set_link(2, "down")
    try:
        digest, output, memberships = ended(process, tmp_path)
    finally:
        four.set_link(2, "up")
    assert memberships == [[0, 1, 2, 3], [0, 2, 3]], output
    assert "the host h2 (node 1) did not respond for 6 s or disconnected; continuing without it" in output
    assert not list((folder / "checkpoints").glob("*"))
    assert digest == undisturbed("steps=120")


def test_spare_hosts_take_the_places_of_lost_ones_in_the_same_change(
    four: Hosts,
    launch: Any,
    undisturbed: Callable[..., str],
    change_workers: Callable[..., str],
    begun: Any,
    tmp_path: Path,
) -> None:
    """Each training host holds half of the model; a lost half is restored from the other host's memory."""
    sharded = ("strategy=fsdp", "checkpoint.at_end=false", "cluster.spare_nodes=2")
    faults = f"faults=[{{action: kill, rank: 2, step: 30}}, {SLOWER}]"
    process = launch("steps=40", "launcher.node_timeout=6", *sharded, faults)
    folder = begun(tmp_path / "project", after=8)
    assert change_workers(folder, "list").count("waiting") == 2
    four.set_link(2, "down")
    try:
        digest, output, memberships = ended(process, tmp_path)
    finally:
        four.set_link(2, "up")
    assert memberships == [[0, 1], [0, 2], [0, 3]], output
    assert json.loads((folder / "run_manifest.json").read_text())["cluster"]["spare_nodes"] == 2
    events = [*map(json.loads, (folder / "events.jsonl").read_text().splitlines())]
    assert [event["joined"] for event in events if event["event"] == "membership"] == [[2], [3]]
    assert not list((folder / "checkpoints").glob("*"))
    assert digest == undisturbed("steps=40")


@pytest.mark.slow
def test_another_host_leads_from_the_newest_checkpoint_when_the_first_is_lost(
    four: Hosts, launch: Any, undisturbed: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    """The lost host still reaches the run folder, and must exit before its replacement writes there."""
    hosts = ("cluster.hosts=[h2,h3,h4]", "cluster.spare_nodes=1", "launcher.node_timeout=6", "launcher.max_restarts=1")
    process = launch("steps=90", "checkpoint.every=10", *hosts, f"faults=[{SLOW}]")
    folder = begun(tmp_path / "project", after=25)
    four.set_link(2, "down")
    try:
        wait_for(process, lambda: len(attempts(folder)) == 2)
        assert not four.processes("worldsize agent", 2)
        first, second = attempts(folder)
        assert (first["exit_reason"], first["lost_host"]) == ("killed", "h2")
        assert second["hosts"] == ["h3", "h4"]
    finally:
        four.set_link(2, "up")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "restarting without h2, on h3, h4 (1 of 1)" in output
    last = attempts(folder)[-1]
    assert last["steps"][0] >= 20
    assert [each["hosts"] for each in last["memberships"]] == [["h3", "h4"]]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["event"] == "step"] == [*range(1, 91)]
    assert json.loads((folder / "result.json").read_text())["state_digest"] == undisturbed("steps=90")


@pytest.mark.slow
def test_the_hosts_that_are_left_go_on_without_the_first_until_it_comes_back(
    four: Hosts, launch: Any, undisturbed: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    hosts = ("cluster.hosts=[h2,h3]", "launcher.node_timeout=6", "launcher.max_restarts=1")
    process = launch("steps=400", "checkpoint.every=10", *hosts, f"faults=[{SLOW}]")
    folder = begun(tmp_path / "project", after=15)
    four.set_link(2, "down")
    try:
        wait_for(process, lambda: len(attempts(folder)) == 2)
        begun(folder, after=15)
    finally:
        four.set_link(2, "up")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "the host h2 (node 1) has rejoined" in output
    first, second = attempts(folder)[-1]["memberships"]
    assert (first["hosts"], second["hosts"]) == (["h3"], ["h3", "h2"])
    assert "the host h2 (node 1) did not respond" in first["lost"]["1"]
    assert json.loads((folder / "result.json").read_text())["state_digest"] == undisturbed("steps=400")


def test_a_host_whose_link_comes_back_takes_part_again(
    four: Hosts, launch: Any, undisturbed: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    process = launch("steps=175", "launcher.node_timeout=6", f"faults=[{SLOWER}]")
    folder = begun(tmp_path / "project", after=8)
    four.set_link(2, "down")
    try:
        wait_until((folder / "events.jsonl").exists)  # the other hosts continue
    finally:
        four.set_link(2, "up")
    digest, output, memberships = ended(process, tmp_path)
    assert memberships[:2] == [[0, 1, 2, 3], [0, 2, 3]], output
    assert memberships[-1] == [0, 2, 3, 1], output
    assert "the host h2 (node 1) has rejoined" in output
    assert digest == undisturbed("steps=175")


def test_workers_come_and_go_and_the_first_host_may_have_none(
    launch: Any, undisturbed: Callable[..., str], change_workers: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    process = launch("steps=65", f"faults=[{{action: kill, rank: 0, step: 5}}, {SLOWER}]")
    folder = begun(tmp_path / "project", after=12)
    assert change_workers(folder, "list").count("worker") == 3
    assert "worker 3" in change_workers(folder, "remove")
    assert "worker 4, worker 5" in change_workers(folder, "add", "2")
    digest, output, memberships = ended(process, tmp_path)
    assert memberships[:2] == [[0, 1, 2, 3], [1, 2, 3]], output
    assert set(memberships[-1]) == {1, 2, 4, 5}, output
    assert digest == undisturbed("steps=65")


def test_a_host_that_is_cut_off_while_it_logs_writes_no_more(
    four: Hosts, launch: Any, undisturbed: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    """It still reaches the run folder, and must not write there alongside the others."""
    faults = f"faults=[{{action: kill, rank: 0, step: 5}}, {SLOWER}]"
    process = launch("steps=40", "launcher.node_timeout=6", faults)
    folder = begun(tmp_path / "project", after=12)
    four.set_link(2, "down")  # the host of rank 1, now the logging rank
    try:
        digest, output, memberships = ended(process, tmp_path)
    finally:
        four.set_link(2, "up")
    assert memberships == [[0, 1, 2, 3], [1, 2, 3], [2, 3]], output
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == sorted(set(steps))
    assert digest == undisturbed("steps=40")


@pytest.mark.slow
def test_ranks_that_share_layers_stay_on_one_host(launch: Any, reference_run: Any, tmp_path: Path) -> None:
    """Rank 1 has lost its only partner on the host: it waits instead of training with a rank of the other host."""
    process = launch("steps=20", "faults=[{action: kill, rank: 0, step: 5}]", model=MESH, each=2)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    (path,) = tmp_path.rglob("run_manifest.json")
    (attempt,) = json.loads(path.read_text())["attempts"]
    assert [each["members"] for each in attempt["memberships"]] == [[0, 1, 2, 3], [2, 3]], output
    assert attempt["memberships"][0]["hosts"] == ["h1", "h1", "h2", "h2"]
    digest = json.loads((path.parent / "result.json").read_text())["state_digest"]
    alone = reference_run(*SHARED, *ELASTIC, "strategy=single", "cluster.processes=1", "steps=20")
    assert digest == alone.json("result.json")["state_digest"]


@pytest.mark.slow
def test_two_hosts_lead_in_turn_when_each_is_lost(
    four: Hosts, launch: Any, undisturbed: Callable[..., str], begun: Any, tmp_path: Path
) -> None:
    hosts = ("cluster.hosts=[h2,h3]", "launcher.node_timeout=6", "launcher.max_restarts=2")
    process = launch("steps=600", "checkpoint.every=10", *hosts, f"faults=[{SLOW}]")
    folder = begun(tmp_path / "project", after=15)

    def has_come_back() -> bool:
        events = folder / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        return any(json.loads(line).get("joined") == [1] for line in lines)

    four.set_link(2, "down")
    try:
        wait_for(process, lambda: len(attempts(folder)) == 2)
    finally:
        four.set_link(2, "up")
    wait_for(process, has_come_back)
    four.set_link(3, "down")
    try:
        wait_for(process, lambda: len(attempts(folder)) == 3)
    finally:
        four.set_link(3, "up")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "restarting without h2, on h3 (1 of 2)" in output
    assert "restarting without h3, on h2 (2 of 2)" in output
    assert json.loads((folder / "result.json").read_text())["state_digest"] == undisturbed("steps=600")


@pytest.mark.slow
def test_a_spare_host_gives_a_mesh_the_ranks_of_a_lost_one(
    four: Hosts, launch: Any, reference_run: Any, begun: Any, tmp_path: Path
) -> None:
    """The two ranks of the spare host share layers, as the two on the lost host did."""
    hosts = ("cluster.hosts=[h1,h2,h3]", "cluster.spare_nodes=1", "launcher.node_timeout=6")
    process = launch("steps=60", *hosts, f"faults=[{SLOW}]", model=MESH, each=2)
    folder = begun(tmp_path / "project", after=8)
    four.set_link(2, "down")
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        four.set_link(2, "up")
    assert process.returncode == 0, output
    (attempt,) = json.loads((folder / "run_manifest.json").read_text())["attempts"]
    assert [each["members"] for each in attempt["memberships"]] == [[0, 1, 2, 3], [0, 1, 4, 5]], output
    assert [each["hosts"] for each in attempt["memberships"]] == [["h1", "h1", other, other] for other in ("h2", "h3")]
    digest = json.loads((folder / "result.json").read_text())["state_digest"]
    alone = reference_run(*SHARED, *ELASTIC, "strategy=single", "cluster.processes=1", "steps=60")
    assert digest == alone.json("result.json")["state_digest"]


def test_a_signal_saves_on_all_hosts(launch: Any, begun: Any, tmp_path: Path) -> None:
    process = launch("steps=2000", f"faults=[{{action: kill, rank: 2, step: 5}}, {SLOW}]")
    folder = begun(tmp_path / "project", after=12)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    (attempt,) = json.loads((folder / "run_manifest.json").read_text())["attempts"]
    assert attempt["exit_reason"] == "preempted"
    assert (folder / "checkpoints" / f"step_{attempt['steps'][1]:07}").exists()


def test_all_processes_of_the_host_with_wrong_bits_leave(
    launch: Any, undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    audit = ("integrity.audit=1", "integrity.on_mismatch=heal", "launcher.max_restarts=2")
    flip = "faults=[{action: flip, target: gradient, rank: 3, step: 9, bit: 30}]"
    process = launch("steps=20", *audit, flip, each=2)
    digest, output, memberships = ended(process, tmp_path, each=2)
    assert (memberships[0], memberships[-1]) == ([0, 1, 2, 3], [0, 1]), output
    assert "step 9: wrong bits on rank 3 on h2" in output
    assert digest == undisturbed("steps=20")
