"""The health of nodes is measured, logged in few lines, and raises an alert when it passes a limit."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.observe.run_folders import START, write_run
from tests.support.runs import REPOSITORY
from tests.support.waiting import wait_until
from worldsize.core import Event, HealthLimits, NodeAlert, RunEnded, StepDone, Straggling
from worldsize.observe.events import EventLog, describe_straggler
from worldsize.observe.health.counters import (
    Counters,
    GpuReading,
    Gpus,
    Memory,
    Network,
    _adapters,
    _interfaces,
    find_memory_limit,
    read_counters,
)
from worldsize.observe.health.files import (
    AlertFiles,
    AlertNews,
    HealthFile,
    NodesHealth,
    health_figures,
    last_samples,
    parse_alert,
    why_host_is_slow,
)
from worldsize.observe.health.process import HealthAlerts, HealthProcess
from worldsize.observe.health.rows import HealthRow, describe_alert, health_row, is_health, why_slow
from worldsize.observe.report.nodes import nodes_health
from worldsize.observe.report.page import render_page
from worldsize.observe.report.read import read_run
from worldsize.observe.subprocess_listeners import SubprocessListeners
from worldsize.observe.watch import Watched, render_screen
from worldsize.record.json_lines import complete_lines, parse_row
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import refresh_run
from worldsize.worker.process import _health_watched
from worldsize.world.environments import Placement

CALM: HealthRow = {
    "time": START,
    "host": "n1",
    "cpu": 0.5,
    "cpu_of_others": 0.0,
    "memory": 0.4,
    "memory_bytes": 4 * 10**9,
    "swap": 0.0,
    "swap_bytes": 0,
    "disk": 0.5,
    "disk_free": 10**12,
    "received": 1e6,
    "sent": 2e6,
    "network_errors": 0.0,
    "resident": {"4": 10**9, "5": 2 * 10**9},
    "gpus": [],
}
HOT = {"index": 3, "utilisation": 0.4, "memory": 0.9, "temperature": 95, "slowed_by": ["temperature"], "ecc_errors": 0}
LIMITS = HealthLimits(
    every=20.0, memory=0.95, process_memory=3e9, swap=1e6, disk=0.9, temperature=90.0, network_errors=60.0, cpus=2
)


def row(**changes: Any) -> HealthRow:
    return {**CALM, **changes}  # type: ignore[typeddict-item]


# ---------------------------------------------------------------- reading


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes named by rank; one holds 200 MB more, has used a second, and has forked a third."""
    body = (
        "import os, sys, time; from worldsize.world.processes import name_process; name_process(int(sys.argv[1]))\n"
        "held = b'x' * int(sys.argv[2])\n"
        "while time.process_time() < float(sys.argv[3]): pass\n"
        "child = os.fork() if held else 1\n"
        "print('ready', flush=True) if child else None; time.sleep(60)"
    )
    started = []
    for words in (("7", "200000000", "1"), ("12", "0", "0")):
        command = [sys.executable, "-c", body, *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    yield started
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


def status(pid: int, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_the_counters_are_those_of_the_kernel(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    read = read_counters(os.getpid(), tmp_path, Gpus(), infiniband=tmp_path)
    first, second = (each.pid for each in ranks)
    # a rank's data workers share its name, but do not hide its own process
    assert read.resident.keys() == {7, 12}
    assert read.resident[7] == pytest.approx(status(first, "VmRSS"), rel=0.02)
    assert read.resident[7] - read.resident[12] > 190e6
    assert 0.98 <= read.own[first] < 3.0  # in ticks of 10 ms
    assert read.own.keys() > {first, second}
    assert len(read.own) >= 3  # including the forked one
    assert os.getpid() not in read.own

    user, nice, system, idle, wait, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    hertz = os.sysconf("SC_CLK_TCK")
    assert read.busy == pytest.approx((user + nice + system + irq + soft + steal) / hertz, rel=0.01)
    assert read.idle == pytest.approx((idle + wait) / hertz, rel=0.01)
    facts = os.statvfs(tmp_path)
    assert read.disk.total == facts.f_blocks * facts.f_frsize
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert memory is not None
    assert read.memory.total <= 1024 * int(memory[1])


def test_memory_is_that_of_the_tightest_control_group_around_the_run(tmp_path: Path) -> None:
    node, own = Memory(60, 1000), tmp_path / "cgroup"
    own.write_text("0::/slurm/job_7/step_0\n")
    assert find_memory_limit(node, cgroups=tmp_path, own=own) == node
    for folder, limit, used in (("slurm", "max", 900), ("slurm/job_7", "500", 450), ("slurm/job_7/step_0", "max", 300)):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text("anon 10\ninactive_file 50\n")
    assert find_memory_limit(node, cgroups=tmp_path, own=own) == Memory(400, 500)
    # in a container with a private view of control groups, the path is the host's, and the limit is at the root
    own.write_text("0::/../../kubepods/pod1\n")
    (tmp_path / "memory.max").write_text("200\n")
    (tmp_path / "memory.current").write_text("190\n")
    (tmp_path / "memory.stat").write_text("inactive_file 30\n")
    assert find_memory_limit(node, cgroups=tmp_path, own=own) == Memory(160, 200)
    own.write_text("5:cpu:/x\n4:memory:/docker/c\n")
    place = tmp_path / "memory/docker/c"
    place.mkdir(parents=True)
    for name, text in (("limit_in_bytes", "300"), ("usage_in_bytes", "299"), ("stat", "total_inactive_file 99")):
        (place / f"memory.{name}").write_text(text)
    assert find_memory_limit(node, cgroups=tmp_path, own=own) == Memory(200, 300)
    (place / "memory.limit_in_bytes").write_text("9223372036854771712")  # no limit
    assert find_memory_limit(node, cgroups=tmp_path, own=own) == node


def test_bytes_of_infiniband_are_counted_in_words_of_four(tmp_path: Path) -> None:
    counters = tmp_path / "mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    for name, value in (("port_rcv_data", 100), ("port_xmit_data", 7), ("symbol_error", 2), ("link_downed", 1)):
        (counters / name).write_text(f"{value}\n")
    assert list(_adapters(tmp_path)) == [Network(400, 28, 3)]


def test_gpus_are_read_and_none_are_there_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    nvml = importlib.import_module("pynvml")
    # the replaced functions must exist under these names; this machine need not have a GPU
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=73, memory=20),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80, used=20),
        "nvmlDeviceGetTemperature": lambda _, sensor: 71 + sensor,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: (
            handle * (nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown)
            | nvml.nvmlClocksThrottleReasonSwPowerCap
        ),
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, scope: 5 if (handle, kind, scope) == (1, 1, 0) else _no(),
    }

    def _no() -> None:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    for name, answer in answers.items():
        monkeypatch.setattr(nvml, name, answer)
    quiet, slow = Gpus().read()
    assert quiet == GpuReading(0, 0.73, 0.25, 71, (), None)
    assert slow == GpuReading(1, 0.73, 0.25, 71, ("hardware", "temperature"), 5)

    def absent() -> None:
        raise nvml.NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(nvml, "nvmlInit", absent)
    assert Gpus().read() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().read() == []


# ---------------------------------------------------------------- a line


def test_a_line_has_what_happened_between_two_readings() -> None:
    before = Counters(
        at=100.0,
        busy=1000.0,
        idle=500.0,
        own={1: 50.0, 2: 10.0},
        memory=Memory(10, 100),
        swap_used=5,
        swapped=1000,
        disk=Memory(1, 10),
        network=Network(1000, 2000, 3),
        resident={0: 5},
        cpus={0, 1},
        gpus=[GpuReading(0, 0.5, 0.5, 60, (), 4), GpuReading(1, None, None, None, ("temperature",), None)],
    )
    # 16 s of 20 on 2 cores are busy; process 1 used 6 s and process 3 is new with 4 s; process 2 has ended
    now = replace(
        before,
        at=110.0,
        busy=1016.0,
        idle=504.0,
        own={1: 56.0, 3: 4.0},
        memory=Memory(90, 100),
        swapped=6000,
        disk=Memory(4, 10),
        network=Network(6000, 1000, 6),
        resident={3: 7, 1: 8},
        gpus=[GpuReading(0, 0.9, 0.5, 61, (), 6), before.gpus[1]],
    )
    line = health_row(before, now, host="n1", time=7.0)
    assert line == {
        "time": 7.0,
        "host": "n1",
        "cpu": 0.8,
        "cpu_of_others": 0.3,
        "memory": 0.9,
        "memory_bytes": 90,
        "swap": 500.0,
        "swap_bytes": 5,
        "disk": 0.4,
        "disk_free": 6,
        "received": 500.0,
        "sent": 0.0,  # a counter that was set back
        "network_errors": 18.0,
        "resident": {"1": 8, "3": 7},
        "cpus": 2,
        "gpus": [
            {"index": 0, "utilisation": 0.9, "memory": 0.5, "temperature": 61, "slowed_by": (), "ecc_errors": 2},
            {"index": 1, "slowed_by": ("temperature",)},
        ],
    }
    assert is_health(json.loads(json.dumps(line)))


@pytest.mark.parametrize(
    "changes",
    [
        {"host": 3},
        {"cpu": "much"},
        {"memory": "nan"},
        {"resident": {"../x": 1}},
        {"resident": [1]},
        {"cpus": "two"},
        {"gpus": [{"index": 0}]},
        {"gpus": [{**HOT, "temperature": "hot"}]},
        {"gpus": [{**HOT, "slowed_by": [3]}]},
    ],
)
def test_a_line_that_others_have_written_is_checked(changes: dict[str, Any]) -> None:
    assert is_health(dict(row(gpus=[HOT])))
    assert not is_health({**CALM, **changes})


# ---------------------------------------------------------------- alerts


def told(alerts: HealthAlerts, **changes: Any) -> list[str]:
    return [each.what for each in alerts.find_new_alerts(row(**changes))]


def test_an_alert_is_raised_once_until_the_figure_has_come_back() -> None:
    alerts = HealthAlerts(LIMITS, node=2)
    assert told(alerts) == []
    (alert,) = alerts.find_new_alerts(row(memory=0.96))
    assert alert == NodeAlert(2, "n1", "memory", 0.96, 0.95, detail="largest: rank 5, 2.00 GB")
    assert told(alerts, memory=0.99) == []
    assert told(alerts, memory=0.94) == []  # not yet back
    assert told(alerts, memory=0.96) == []
    assert told(alerts, memory=0.80) == []
    assert told(alerts, memory=0.96) == ["memory"]


def test_each_kind_of_figure_has_its_limit() -> None:
    alerts = HealthAlerts(LIMITS, node=0)
    sick = {"disk": 0.91, "network_errors": 61.0, "swap": 2e6, "gpus": [HOT]}
    assert told(alerts, **sick) == ["disk", "network"]
    assert told(alerts, **sick) == ["swap", "temperature", "throttled"]  # twice in a row
    assert told(HealthAlerts(HealthLimits(20.0), node=0), **sick, memory=1.0) == []


def test_a_short_time_of_swapping_or_heat_is_no_alert() -> None:
    alerts = HealthAlerts(LIMITS, node=0)
    assert [told(alerts, swap=swap) for swap in (2e6, 0.0, 2e6, 0.0)] == [[]] * 4


def test_each_new_memory_error_of_a_gpu_is_told() -> None:
    alerts, bad = HealthAlerts(LIMITS, node=0), {**HOT, "temperature": 50, "slowed_by": [], "ecc_errors": 1}
    assert [told(alerts, gpus=[bad]) for _ in range(2)] == [["ecc"], ["ecc"]]


def test_the_rank_that_holds_too_much_is_named_with_its_bytes_and_the_bound() -> None:
    (alert,) = HealthAlerts(LIMITS, node=1).find_new_alerts(row(resident={"8": 10**9, "9": 3_456_000_000}))
    assert (alert.what, alert.rank, alert.value, alert.limit) == ("process_memory", 9, 3_456_000_000, 3e9)
    assert describe_alert(vars(alert)) == ("node 1, n1: rank 9 uses 3.46 GB, more than cluster.max_memory (3.00 GB).")


def test_ranks_that_are_bound_to_fewer_cpus_than_they_need_are_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert told(HealthAlerts(LIMITS, node=1), cpus=1) == [], "the machine has no more"
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    alerts = HealthAlerts(LIMITS, node=1)
    assert [told(alerts, cpus=cpus) for cpus in (0, 2)] == [[], []], "0: no rank runs yet"
    (alert,) = alerts.find_new_alerts(row(cpus=1))
    expected = "node 1, n1: processes require 2 CPUs (cluster.threads, data_workers), 1 available."
    assert describe_alert(vars(alert)) == expected
    assert told(alerts, cpus=1) == []


def test_a_slow_rank_is_explained_by_what_its_host_suffers_most_of_the_time() -> None:
    assert why_slow([row(), row()]) == ""
    assert why_slow([row(swap=5e6), row(swap=15e6), row()]) == "swapping 10 MB/s"
    assert why_slow([row(gpus=[HOT]), row(gpus=[HOT]), row()]) == "GPU 3 is throttled (temperature)"
    assert why_slow([row(gpus=[HOT]), row(), row()]) == ""
    busy = row(cpu=0.99, cpu_of_others=0.4)
    assert why_slow([busy]) == "all CPUs are busy, 40 % with processes outside this run"
    assert why_slow([row(cpu=0.6, cpu_of_others=0.4)]) == ""  # some are free


@pytest.mark.parametrize(
    ("name", "is_counted"),
    [
        *(
            (name, True)
            for name in ("eth0", "eno1", "ens5f0np0", "enp3s0", "enx001122334455", "wlan0", "hsn0", "bnep0")
        ),
        *((name, False) for name in ("lo", "ib0", "ibs1", "ibp23s0", "eth0.100", "bond0.7", "vlan10", "vxlan.calico")),
        *((name, False) for name in ("cilium_host", "lxc1a2b", "br0", "br-1a2b", "macvlan0", "dummy0", "veth1a2b")),
    ],
)
def test_bytes_that_pass_two_interfaces_are_counted_once(
    name: str, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = SimpleNamespace(bytes_recv=3, bytes_sent=4, errin=1, errout=1)
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic: {name: counts})
    assert list(_interfaces()) == ([Network(3, 4, 2)] if is_counted else [])


# ---------------------------------------------------------------- files


def test_a_file_of_a_long_run_has_a_bounded_number_of_lines(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    file = HealthFile(run, 0)
    line = json.dumps(CALM) + "\n"
    run.get_health_file(0).write_text(4999 * line)
    file = HealthFile(run, 0)
    for number in range(3):
        file.add_row(row(time=float(number)), [])
    lines = run.get_health_file(0).read_text().splitlines()
    assert len(lines) == 2502
    assert [json.loads(each)["time"] for each in lines[-3:]] == [0.0, 1.0, 2.0]
    assert [each["time"] for each in last_samples(run.get_health_file(0), since=1.0)] == [1.0, 2.0]


def test_alerts_of_all_nodes_reach_the_events_of_the_run_and_its_listeners(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    old = NodeAlert(1, "n1", "disk", 0.97, 0.95)
    HealthFile(run, 1).add_row(CALM, [old])
    files, news, log = AlertFiles(run), AlertNews(run.events), EventLog(run.events)
    alerts = [NodeAlert(1, "n1", "ecc", 2, 0, gpu=3), NodeAlert(2500, "n2", "memory", 0.99, 0.95)]
    for alert in alerts:
        HealthFile(run, alert.node).add_row(CALM, [alert])
    assert run.get_health_file(2500).parent.name == "02000"
    names = ["health/alerts/02000/node_02500_alerts.jsonl", "health/alerts/node_00001_alerts.jsonl"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*_alerts.jsonl")) == names
    (run.get_health_file(1).parent / "node_00007_alerts.jsonl").write_text(
        json.dumps(vars(alerts[0])) + "\n"
    )  # not looked at
    passed = list(files.read_new_alerts())
    assert sorted(passed, key=lambda each: each.node) == alerts
    assert list(files.read_new_alerts()) == []
    for alert in passed:
        log(alert)
    with run.events.open("a") as file:
        file.write('{"event": "node_alert", "time": 1.0, "node": "x"}\nnonsense\n')
    assert news.read_alerts() == passed
    assert news.read_alerts() == []


def test_the_process_of_the_first_node_passes_on_what_is_at_hand_when_it_ends(tmp_path: Path) -> None:
    run, alert = RunDirectory(tmp_path), NodeAlert(1, "n1", "disk", 0.97, 0.95)
    with HealthProcess(tmp_path, HealthLimits(3600.0), node=0) as health:
        pid, mine = health._process.pid, os.getpriority(os.PRIO_PROCESS, 0)
        assert pid is not None
        while os.getpriority(os.PRIO_PROCESS, pid) < min(mine + 5, 19):  # it checks for alerts from then on
            time.sleep(0.01)
        HealthFile(run, 1).add_row(CALM, [alert])
    assert [parse_alert(parse_row(line)) for line in run.events.read_bytes().splitlines()] == [alert]
    assert not Path(f"/proc/{pid}").exists()


def test_ranks_that_somebody_starts_by_hand_have_one_process_for_each_node(tmp_path: Path) -> None:
    settings: Any = SimpleNamespace(observe=SimpleNamespace(watched=LIMITS))
    run = RunDirectory(tmp_path)

    def watches(rank: int, heartbeat: Path | None = None) -> bool:
        place = Placement(rank, 8, rank % 4, 4, "env://", heartbeat=heartbeat)
        return isinstance(_health_watched(settings, run, place), HealthProcess)

    assert [watches(rank) for rank in range(8)] == [rank % 4 == 0 for rank in range(8)]
    assert not watches(0, tmp_path)  # its launching process does
    settings.observe.watched = None
    assert not watches(0)


def test_listeners_are_told_alerts_between_other_events(tmp_path: Path) -> None:
    run, told = RunDirectory(tmp_path), tmp_path / "told"
    alert = NodeAlert(0, "n0", "memory", 0.99, 0.95)

    def make() -> Any:
        def listen(event: Event) -> None:
            with told.open("a") as file:
                file.write(f"{event!r}\n")

        return listen

    listeners = SubprocessListeners({"logger": make}, alerts=AlertNews(run.events).read_alerts)
    EventLog(run.events)(alert)
    listeners(RunEnded(3, "completed"))
    assert told.read_text().splitlines() == [repr(alert), repr(RunEnded(3, "completed"))]


def test_the_host_of_a_slow_rank_is_asked_for_its_health(tmp_path: Path) -> None:
    run, now = RunDirectory(tmp_path), time.time()
    for node, host, swap in ((0, "a", 0.0), (1, "b", 5e6)):
        HealthFile(run, node).add_row(row(host=host, time=now, swap=swap), [])
    assert why_host_is_slow(run, "b", 9, per_node=8) == "swapping 5 MB/s"
    assert why_host_is_slow(run, "a", 0, per_node=8) == ""
    assert why_host_is_slow(run, "b", 0, per_node=8) == "swapping 5 MB/s"  # its ranks may be anywhere
    assert why_host_is_slow(run, "c", 0, per_node=8) == ""
    run.get_health_file(1).write_text(json.dumps(row(host="b", time=now - 600, swap=5e6)) + "\n")
    assert why_host_is_slow(run, "b", 9, per_node=8) == ""  # long ago


# ---------------------------------------------------------------- display


SICK: dict[int, dict[str, Any]] = {7: {"swap": 3e6, "cpu": 1.0}, 599: {"gpus": [HOT], "host": "n<b>"}}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with 600 nodes, two of them in a bad state."""
    run = RunDirectory(write_run(tmp_path_factory.mktemp("large") / "run", steps=30, ranks=4))
    now = time.time()
    for node in range(600):
        bad: dict[str, Any] = SICK.get(node, {})
        HealthFile(run, node).add_row(row(**{"time": now, "host": f"n{node}", **bad}), [])
    return run


def test_watch_shows_the_nodes_that_deserve_a_look_most(large: RunDirectory) -> None:
    watched, out = Watched(large.path), io.StringIO()
    watched.update_rows()
    Console(file=out, width=200).print(render_screen(watched, refresh_run(large).manifest, "running"))
    lines = out.getvalue().splitlines()
    assert "8 of 600 nodes" in out.getvalue()
    (swapping,) = [line for line in lines if "n7" in line]
    assert "3 MB/s" in swapping
    assert "rank 5: 2 GB" in swapping
    (hot,) = [line for line in lines if "n<b>" in line]
    assert "95 °C" in hot
    assert "GPU 3: temperature" in hot


def test_figures_for_a_logger_are_few_whatever_the_number_of_nodes(large: RunDirectory) -> None:
    clock = iter([time.time(), time.time(), time.time() + 100])
    nodes = NodesHealth(large.path, clock=lambda: next(clock))
    figures = health_figures(nodes.read_new_samples())
    assert nodes.read_new_samples() == {}  # not yet time
    assert len(nodes.read_new_samples()) == 600
    assert len(figures) < 20
    assert figures["health/swap"] == 3e6
    assert figures["health/gpu_temperature"] == 95
    assert figures["health/received"] == pytest.approx(600e6)
    few = health_figures({0: row(cpu=0.2), 1: row(cpu=0.4)})
    assert few["health/cpu"] == pytest.approx(0.3)
    assert few["health/node_1/cpu"] == 0.4
    assert health_figures({}) == {}


def test_the_report_shows_health_and_alerts(large: RunDirectory) -> None:
    alert = vars(NodeAlert(599, "n<b>", "throttled", 1, 0, gpu=3, detail="temperature"))
    large.events.write_text(json.dumps({"event": "node_alert", "time": START + 9, **alert}) + "\n")
    text = render_page([large.path])
    assert "Health of the nodes" in text
    assert "node 599, n&lt;b&gt;: GPU 3 is throttled (temperature)." in text
    assert "GPU 3: temperature" in text  # the node with an alert is shown
    assert "568 more nodes" in text


def test_the_report_adds_up_what_a_gpu_suffered_at_different_times(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "run", steps=30, ranks=4))
    file = HealthFile(run, 0)
    for gpu in (
        {"index": 3, "utilisation": 0.2, "memory": 0.9, "temperature": 95, "slowed_by": ["power"], "ecc_errors": 4},
        {"index": 3, "utilisation": 0.6, "memory": 0.5, "temperature": 60, "slowed_by": ["heat"], "ecc_errors": 0},
        {"index": 3, "utilisation": 0.7, "memory": 0.4, "temperature": 61, "slowed_by": [], "ecc_errors": 3},
    ):
        file.add_row(row(gpus=[gpu]), [])
    table = nodes_health(read_run(run.path))
    assert table is not None
    assert table.rows[0][-4:] == ("50%", "95 °C", "GPU 3: heat, power", "7")
    alerts = [NodeAlert(0, "n1", "ecc", errors, 0, gpu=3) for errors in (4, 5, 3)]  # one from a dropped line
    with run.events.open("a") as events:
        events.writelines(json.dumps({"event": "node_alert", "time": START, **vars(each)}) + "\n" for each in alerts)
    table = nodes_health(read_run(run.path))
    assert table is not None
    assert table.rows[0][-1] == "12"


# ---------------------------------------------------------------- a run


def test_a_run_records_its_nodes_and_warns_of_a_process_that_grows_beyond_its_bound(
    tmp_path: Path, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    watch = ("observe.health.every=0.4", "cluster.max_memory=1e8", "checkpoint=none", "logger=none")
    words = ("recipe=digits", "recipe.width=4", "steps=100000", "cluster.processes=2", "cluster.threads=1", *watch)
    with (tmp_path / "output").open("w") as output:
        command = [str(warm_python), str(REPOSITORY / "train.py"), *words]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment_without_wandb, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        run = RunDirectory(begun(tmp_path))
        # its process yields to all others
        wait_until(lambda: len(alerts_of(run)) > 1 and len(last_samples(run.get_health_file(0), at_most=1000)) > 2)
        alerts, rows = alerts_of(run), last_samples(run.get_health_file(0), at_most=1000)
    finally:
        process.terminate()
    assert process.wait(110) == 128 + signal.SIGTERM  # it saves nothing
    assert rows[0]["resident"].keys() == {"0", "1"}
    assert min(rows[0]["resident"].values()) > 1e8  # torch by itself is larger
    assert any(0 < each["cpu"] <= 1 and each["cpu_of_others"] < each["cpu"] for each in rows)
    assert {(each.what, each.rank, each.limit) for each in alerts} == {("process_memory", rank, 1e8) for rank in (0, 1)}
    assert "more than cluster.max_memory (0.10 GB)" in (tmp_path / "output").read_text()


def alerts_of(run: RunDirectory) -> list[NodeAlert]:
    rows = [parse_row(line) for line, _ in complete_lines(run.events)]
    return [alert for row in rows if row and row["event"] == "node_alert" and (alert := parse_alert(row))]


def test_a_straggler_is_described_with_the_health_of_its_host() -> None:
    event = Straggling(250, 2, "n3", "cuda:1", "compute", 1.2, 210, health="GPU 1 is throttled (temperature)")
    assert describe_straggler(event).endswith("slow compute (GPU 1 is throttled (temperature)).")
    assert parse_row(json.dumps(vars(event)).encode()) is not None


def test_listeners_of_runs_without_alerts_are_told_nothing_else(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def make() -> Any:
        return lambda event: told.write_text(type(event).__name__)

    listeners = SubprocessListeners({"logger": make})
    listeners(StepDone(1, 1, 0.1, 0.1, None, 0, 0.0, (0.1,), 1.0))
    listeners(RunEnded(1, "completed"))
    assert told.read_text() == "RunEnded"
