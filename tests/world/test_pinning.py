"""Processes stay on the cores and memory next to their GPUs, following the machine's NUMA description."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from torch.numa import binding

from tests.support.own_recipe import write_recipe
from worldsize.core import Cluster, ConfigError, Pinning
from worldsize.world import pinning
from worldsize.world.environments import Placement
from worldsize.world.pinning import (
    MachineTopology,
    Pin,
    Pins,
    _prefer_memory,
    cuda_gpus,
    format_ranges,
    parse_ranges,
    pin_process,
    pins_here,
    plan_pins,
    read_topology,
    visible_gpus,
)
from worldsize.world.world import select_device

Machine = tuple[Sequence[str], Mapping[str, int], Mapping[str, int]]
# each NUMA node's cores as listed by the kernel, GPUs with their NUMA nodes, and adapters with theirs
H100: Machine = (
    ("0-55,112-167", "56-111,168-223"),  # a DGX H100: two sockets of 56 cores with two threads each
    {f"0000:{bus}:00.0": 0 for bus in ("1b", "43", "52", "61")}
    | {f"0000:{bus}:00.0": 1 for bus in ("9d", "c3", "d1", "df")},
    {**{f"mlx5_{index}": 0 for index in range(6)}, **{f"mlx5_{index}": 1 for index in range(6, 12)}},
)
A100: Machine = (
    tuple(f"{16 * node}-{16 * node + 15},{128 + 16 * node}-{143 + 16 * node}" for node in range(8)),
    dict(  # a DGX A100: two sockets of four NUMA nodes each; half of the nodes have two GPUs
        zip(
            (f"0000:{bus}:00.0" for bus in ("07", "0f", "47", "4e", "87", "90", "b7", "bd")),
            (3, 3, 1, 1, 7, 7, 5, 5),
            strict=True,
        )
    ),
    {"mlx5_0": 3, "mlx5_4": -1},
)
ODD: Machine = (("0-6", "7-9"), {"0000:01:00.0": 0, "0000:02:00.0": 0, "0000:03:00.0": 0, "0000:04:00.0": 1}, {})


def write_machine(root: Path, machine: Machine) -> Path:
    """Write a machine's ``/sys`` below ``root``, in Linux's layout and format."""
    nodes, gpus, adapters = machine
    numbers = sorted(number for text in nodes for number in parse_ranges(text))
    folder = root / "sys/devices/system"
    for node, text in enumerate(nodes):
        _write(folder / f"node/node{node}/cpulist", text)
        own = parse_ranges(text)
        half = len(own) // 2 if "," in text else len(own)
        for place, core in enumerate(own):
            same = {own[place % half], own[place % half + half]} if half < len(own) else {core}
            _write(folder / f"cpu/cpu{core}/topology/thread_siblings_list", ",".join(map(str, sorted(same))))
    _write(folder / "cpu/online", format_ranges(numbers))
    _write(folder / "node/possible", f"0-{len(nodes) - 1}")
    others = {"0000:00:1f.0": ("0x8086", "0x060100", 0), "0000:02:1f.0": ("0x10de", "0x068000", 0)}  # no GPUs: a bridge
    devices = {address: ("0x10de", "0x030200", node) for address, node in gpus.items()} | others
    for address, (vendor, kind, node) in devices.items():
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            _write(root / f"sys/bus/pci/devices/{address}/{name}", text)
    for name, node in adapters.items():
        _write(root / f"sys/class/infiniband/{name}/device/numa_node", str(node))
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def planned(
    machine: MachineTopology, pin: Pinning = "auto", *, processes: int = 8, cpu: bool = False, **changes: Any
) -> Pins:
    facts: dict[str, Any] = {"usable": machine.cores, "gpus": [] if cpu else [*machine.gpus][:processes], **changes}
    return plan_pins(pin, machine, processes=processes, **facts)


@pytest.mark.parametrize("machine", [H100, A100, ODD], ids=["H100", "A100", "odd"])
@pytest.mark.parametrize("pin", ["numa", "exclusive"])
def test_processes_are_pinned_as_torchrun_binds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, pin: Pinning
) -> None:
    root = write_machine(tmp_path, machine)
    topology = read_topology(root)
    homes = [*topology.gpus.values()]

    def redirected(path: str) -> IO[str]:
        return (root / path.lstrip("/")).open()

    monkeypatch.setattr(binding, "open", redirected, raising=False)
    monkeypatch.setattr(binding, "_get_device_count", lambda: len(homes))
    monkeypatch.setattr(binding, "_get_numa_node_index_for_device_index", lambda *, device_index: homes[device_index])
    monkeypatch.setattr(binding, "_get_allowed_cpu_indices_for_current_thread", lambda: set(topology.cores))
    bound: Callable[..., set[int]] = {
        "numa": binding._node_get_logical_cpus_to_bind_to,
        "exclusive": binding._exclusive_get_logical_cpus_to_bind_to,
    }[pin]
    pins = planned(topology, pin, processes=len(homes)).processes
    assert [set(each.cores) for each in pins] == [bound(device_index=index) for index in range(len(homes))]
    assert [each.numa for each in pins] == homes
    assert [each.gpu for each in pins] == [*machine[1]]


def test_a_machine_is_read_as_the_kernel_describes_it(tmp_path: Path) -> None:
    machine = read_topology(write_machine(tmp_path, H100))
    assert len(machine.cores) == 224
    assert (machine.physical[167], machine.physical[55], machine.physical[168]) == (55, 55, 56)
    assert machine.gpus == H100[1]
    eight = read_topology(write_machine(tmp_path / "other", A100))
    assert eight.adapters == {"mlx5_0": 3, "mlx5_4": None}
    assert read_topology(tmp_path / "empty").cores == frozenset()


def test_each_process_is_told_what_is_near_it(tmp_path: Path) -> None:
    pins = planned(read_topology(write_machine(tmp_path, H100)))
    assert str(pins.processes[4]) == (
        "cores 56-111,168-223, memory of NUMA node 1, near GPU 0000:9d:00.0 and "
        "mlx5_10, mlx5_11, mlx5_6, mlx5_7, mlx5_8, mlx5_9"
    )
    assert pins.describe()["processes"][0] == {
        "local_rank": 0,
        "cores": "0-55,112-167",
        "numa": 0,
        "gpu": "0000:1b:00.0",
        "adapters": [f"mlx5_{index}" for index in range(6)],
    }
    assert pins.get_pin(8) is None  # it joined later


def test_processes_on_cpus_are_spread_over_the_numa_nodes(tmp_path: Path) -> None:
    machine = read_topology(write_machine(tmp_path, H100))
    assert [each.numa for each in planned(machine, processes=4, cpu=True).processes] == [0, 0, 1, 1]
    shares = [each.cores for each in planned(machine, "exclusive", processes=16, cpu=True).processes]
    assert [len(share) for share in shares] == [14] * 16
    assert frozenset[int]().union(*shares) == machine.cores
    assert shares[0] == {*range(7), *range(112, 119)}  # both threads of a physical core


def test_auto_leaves_processes_alone_where_it_would_not_help(tmp_path: Path) -> None:
    two = read_topology(write_machine(tmp_path, H100))
    laptop = read_topology(write_machine(tmp_path / "laptop", (("0-7",), {}, {})))
    unknown = read_topology(write_machine(tmp_path / "vm", (("0-7", "8-15"), {"0000:01:00.0": -1}, {})))
    for pins, reason in (
        (planned(laptop, processes=2, cpu=True), "a single NUMA node"),
        (planned(two, processes=1, cpu=True), "1 processes cannot be divided evenly over 2 NUMA nodes"),
        (planned(unknown, processes=1), "does not report the NUMA nodes of the GPUs"),
        (planned(two, usable=frozenset(range(32))), "already bound to cores 0-31 of 0-223"),  # Slurm, Kubernetes
        (planned(two, processes=4, gpus=[*two.gpus][:2]), "found 2 visible GPUs for 4 processes"),
        (planned(two, "none"), "cluster.pin=none"),
    ):
        assert pins.processes == ()
        assert reason in pins.reason
    # on request, it stays within the scheduler's allocation
    within = planned(two, "numa", usable=frozenset({3, 4, 60}))
    assert [sorted(each.cores) for each in within.processes] == [[3, 4]] * 4 + [[60]] * 4


def test_more_processes_than_physical_cores_cannot_have_some_of_their_own(tmp_path: Path) -> None:
    machine = read_topology(write_machine(tmp_path, (("0-1,4-5", "2-3,6-7"), {}, {})))
    assert len(planned(machine, "exclusive", processes=4, cpu=True).processes) == 4
    with pytest.raises(ConfigError, match="NUMA node 0 has 2 physical cores for 3 processes. Set cluster.pin=numa or"):
        planned(machine, "exclusive", processes=5, cpu=True)


@pytest.mark.parametrize("pin", ["numa", "exclusive"])
def test_processes_without_a_gpu_beside_others_with_one_are_not_pinned(tmp_path: Path, pin: Pinning) -> None:
    machine = read_topology(write_machine(tmp_path, H100))
    with pytest.raises(
        ConfigError, match=rf"pin={pin}: found 2 visible GPUs for 4 processes\. Set cluster\.pin=none, or start"
    ):
        planned(machine, pin, processes=4, gpus=[*machine.gpus][:2])


@pytest.mark.parametrize("pin", ["numa", "exclusive"])
def test_a_process_that_mpirun_has_bound_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pin: Pinning
) -> None:
    machine = read_topology(write_machine(tmp_path, H100))
    applied, own = list[Pin](), {3}
    monkeypatch.setattr(pinning, "read_topology", lambda: machine)
    monkeypatch.setattr(pinning, "apply_pin", applied.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: own)
    cluster = Cluster("test", 1, 4, "cpu", "gloo", pin=pin)
    with caplog.at_level(logging.INFO):
        assert pin_process(cluster, local_rank=3, processes=4, has_launcher=False) is None
    assert f"pin={pin} is ignored: the parent process has already bound this process to cores 3" in caplog.text
    assert applied == []
    own = {*machine.cores}  # it is not bound
    placed = pin_process(cluster, local_rank=3, processes=4, has_launcher=False)
    assert applied == [placed]
    own = {*range(4)}  # the launcher's, shared by all processes
    placed = pin_process(cluster, local_rank=3, processes=4, has_launcher=True)
    assert placed is not None
    assert placed.cores == ({3} if pin == "exclusive" else {*range(4)})


def test_gpus_that_are_not_visible_do_not_count(tmp_path: Path) -> None:
    machine = read_topology(write_machine(tmp_path, H100))
    assert visible_gpus(machine, {}, 8) == [*H100[1]]
    assert visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "4, 1"}, 2) == ["0000:9d:00.0", "0000:43:00.0"]
    assert visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, 1) == ["0000:1b:00.0"]
    cluster = Cluster("test", 1, 2, "cuda", "nccl", pin="numa")
    here = machine.cores | os.sched_getaffinity(0)
    pins = pins_here(cluster, {"CUDA_VISIBLE_DEVICES": "7,0"}, machine=machine)
    assert [each.gpu for each in pins.processes] == ["0000:df:00.0", "0000:1b:00.0"]
    assert all(each.cores <= here for each in pins.processes)


@pytest.mark.parametrize(("visible", "index", "bus"), [(1, 0, 5), (4, 2, 7)])
def test_a_task_of_srun_that_sees_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, visible: int, index: int, bus: int
) -> None:
    def properties(number: int) -> SimpleNamespace:
        if number >= visible:
            raise AssertionError("Invalid device id")  # as torch does
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=5 + number, pci_device_id=0)

    chosen = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    cluster = Cluster("slurm", 1, 4, "cuda", "nccl")
    assert select_device(Placement(2, 4, 2, 4, "env://"), cluster) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]
    assert cuda_gpus(4)[2] == f"0000:{bus:02x}:00.0"


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8,10-11"])
def test_lists_of_cores_are_read_and_written_as_the_kernel_does(text: str) -> None:
    assert format_ranges(parse_ranges(text)) == text


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_memory_is_preferred_where_the_process_runs() -> None:
    pid = os.fork()
    if pid == 0:
        agreed = _prefer_memory(0)
        told = Path("/proc/self/numa_maps").read_text() if agreed else "prefer:0"
        os._exit(0 if re.search(r"\bprefer(=relative)?:0", told) else 1)
    assert os.waitpid(pid, 0)[1] == 0


RECIPE = """
import os
from pathlib import Path

import torch
from torch import nn

from worldsize.core import Recipe


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        place = Path("status", f"{os.environ['RANK']} {os.getpid()}")
        place.write_text(Path("/proc/self/status").read_text())
        return torch.ones(4)


class Told(Recipe):
    def model(self):
        return nn.Linear(4, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split):
        return Rows()

    def loss(self, model, batch):
        Path("status", f"{os.environ['RANK']} trains").write_text(Path("/proc/self/status").read_text())
        return model(batch).square().mean()

    def evaluate(self, model, batch):
        return {"error": (model(batch).sum().double(), torch.tensor(len(batch)))}
"""
YAML = """# @package _global_
steps: 3
batch_size: 8
lr: 0.1
recipe:
  _target_: recipes.told.recipe.Told
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell apart")
def test_processes_of_a_run_and_their_data_workers_are_where_the_manifest_says(tmp_path: Path, train: Any) -> None:
    write_recipe(tmp_path, "told", RECIPE, told=YAML)
    (tmp_path / "status").mkdir()
    words = ("recipe=told", "cluster.processes=2", "cluster.pin=exclusive", "data_workers=1", "checkpoint=none")
    run = train(*words)
    assert run.code == 0, run.error
    (attempt,) = json.loads((run.folder / "run_manifest.json").read_text())["attempts"]
    said = [each["cores"] for each in attempt["pinning"]["processes"]]
    assert {*parse_ranges(said[0])}.isdisjoint(parse_ranges(said[1]))
    told = {path.name: path.read_text() for path in (tmp_path / "status").iterdir()}
    allowed = {name: re.search(r"^Cpus_allowed_list:\s*(.*)", text, re.M) for name, text in told.items()}
    assert {name.split()[0] for name in allowed if "trains" not in name} == {"0", "1"}  # data workers
    assert {(name.split()[0], cores and cores[1]) for name, cores in allowed.items()} == {
        ("0", said[0]),
        ("1", said[1]),
    }
    names = {name: re.match(r"Name:\s*(.*)", text) for name, text in told.items() if "trains" in name}
    assert {cores and cores[1] for cores in names.values()} == {"rank 0", "rank 1"}

    shown = train(*words, "launch=show")
    assert f"    on cores {said[1]}, memory of NUMA node" in shown.output
    assert "not pinned: the machine has a single NUMA node" in train(*words[:2], "launch=show").output or (
        len(read_topology().numa) > 1
    )
    refused = train("recipe=told", "cluster.processes=4096", "batch_size=4096", "cluster.pin=exclusive")
    assert refused.code == 2
    assert "physical cores for" in refused.error
    assert refused.folder is None
