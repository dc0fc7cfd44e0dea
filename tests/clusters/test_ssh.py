"""A run trains across hosts reachable by ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from worldsize.testing.hosts import Hosts

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]
DIGITS = ("recipe=digits", "reproducibility=elastic", "cluster.threads=1", "logger=none", "log_every=1")
SLOW = "faults=[{action: sleep, seconds: 0.1, attempt: null}]"  # slows every step of rank 0


class Launched:
    """train.py, started on the first host."""

    def __init__(
        self, hosts: Hosts, folder: Path, environment: dict[str, str], python: str | Path, *options: str
    ) -> None:
        ssh = ",".join(hosts.ssh)
        words = (*DIGITS, "+cluster=ssh", "cluster.hosts=[h1,h2]", "cluster.processes_per_node=2")
        own = (f"cluster.ssh=[{ssh}]", f"cluster.python={python}", f"cluster.folder={folder}/%h")
        command = [str(python), str(REPOSITORY / "train.py"), *words, *own, *options]
        self.process = subprocess.Popen(
            hosts.wrap_command(1, command),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, seconds: float = 240) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output


@pytest.fixture
def launch(hosts: Hosts, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path) -> Iterator[Any]:
    """``launch("steps=30")`` starts a run on both hosts; ``python`` is the interpreter of all its processes."""
    folder = tmp_path / "project"
    folder.mkdir()

    def start(*options: str, python: str | Path = warm_python) -> Launched:
        return Launched(hosts, folder, environment_without_wandb, python, *options)

    yield start
    wait_until(
        lambda: not hosts.processes("worldsize agent"), lambda: hosts.processes("worldsize agent")
    )  # on any host


def folder_of(root: Path) -> Path:
    (manifest,) = (root / "project").rglob("run_manifest.json")
    return manifest.parent


def test_two_hosts_train_to_the_bits_of_one(launch: Any, reference_run: Any, tmp_path: Path) -> None:
    code, output = launch("steps=30", python=sys.executable).end()  # a cold start, from the copied code
    assert code == 0, output
    run = folder_of(tmp_path)
    result = json.loads((run / "result.json").read_text())
    alone = reference_run(*DIGITS, "steps=30", "cluster.processes=4").json("result.json")
    assert result["state_digest"] == alone["state_digest"]
    manifest = json.loads((run / "run_manifest.json").read_text())
    assert manifest["attempts"][0]["hosts"] == ["h1", "h2"]
    assert "step 30/30" in output
    assert (tmp_path / "project" / "h2" / "worldsize" / "framework" / "worldsize" / "core" / "launcher.py").exists()


def test_a_host_whose_link_is_cut_is_named_before_collectives_time_out(
    hosts: Hosts, launch: Any, begun: Any, tmp_path: Path
) -> None:
    launched = launch("steps=2000", SLOW, "launcher.node_timeout=10", "cluster.timeout=600")
    begun(tmp_path / "project")
    hosts.set_link(2, "down")
    try:
        code, output = launched.end()
    finally:
        hosts.set_link(2, "up")
    assert code == 1
    assert "the host h2 (node 1) did not respond for 10 s or disconnected" in output


def test_a_host_that_is_killed_is_named(hosts: Hosts, launch: Any, begun: Any, tmp_path: Path) -> None:
    launched = launch("steps=2000", SLOW)
    begun(tmp_path / "project")
    for pid in hosts.processes("worldsize agent"):
        if _host_of(pid) == "h2":
            with suppress(ProcessLookupError):  # it may have died with its agent
                os.kill(pid, signal.SIGKILL)
    code, output = launched.end()
    assert code == 1
    assert "the host h2 (node 1) did not respond" in output


def _host_of(pid: int) -> str:
    done = subprocess.run(["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"], capture_output=True, text=True)
    return done.stdout.strip()


def test_a_rank_that_fails_is_the_cause_whatever_its_host(launch: Any, tmp_path: Path) -> None:
    code, output = launch("steps=30", "faults=[{action: kill, rank: 3, step: 9}]").end()
    assert code == 1
    assert "worker 3 failed at step 9:\nkilled by SIGKILL" in output
    (attempt,) = json.loads((folder_of(tmp_path) / "run_manifest.json").read_text())["attempts"]
    failure = {"role": "worker", "rank": 3, "host": "h2", "step": 9, "cause": "killed by SIGKILL"}
    assert attempt["failure"] == failure


def test_an_interrupt_saves_and_the_run_can_be_resumed(
    launch: Any,
    begun: Any,
    tmp_path: Path,
    reference_run: Any,
    command: Any,
    environment_without_wandb: dict[str, str],
) -> None:
    """The run is sharded inside each host and replicated across them; it resumes unsharded on one host."""
    launched = launch("steps=100", SLOW, "strategy=hsdp")
    begun(tmp_path / "project", after=10)
    launched.process.send_signal(signal.SIGTERM)
    code, output = launched.end()
    assert code == 75, output
    run = folder_of(tmp_path)
    changes = ("cluster=laptop", "cluster.processes=2", "faults=[]", "strategy=ddp")
    done = command("resume", str(run), *changes, cwd=run, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    alone = reference_run(*DIGITS, "steps=100", "cluster.processes=4").json("result.json")
    assert json.loads((run / "result.json").read_text())["state_digest"] == alone["state_digest"]


def test_a_launching_process_that_is_killed_leaves_nothing_behind(launch: Any, begun: Any, tmp_path: Path) -> None:
    launched = launch("steps=2000", SLOW)
    begun(tmp_path / "project")
    launched.process.kill()
    launched.end()  # the fixture checks that no process is left


def test_servers_and_workers_on_several_hosts_speak_tls(launch: Any, reference_run: Any, tmp_path: Path) -> None:
    code, output = launch("steps=30", "strategy=parameter_server", "strategy.servers=2").end()
    assert code == 0, output
    alone = reference_run(*DIGITS, "steps=30", "cluster.processes=4").json("result.json")
    result = json.loads((folder_of(tmp_path) / "result.json").read_text())
    assert result["state_digest"] == alone["state_digest"]


def test_a_host_that_does_not_answer_or_refuses_is_named_before_anything_starts(
    launch: Any, hosts: Hosts, tmp_path: Path
) -> None:
    code, output = launch("steps=30", "cluster.hosts=[h1,h9]").end()
    assert code == 2
    assert "h9: ssh: Could not resolve hostname h9" in output
    (tmp_path / "other").write_text("no key\n")
    (tmp_path / "other").chmod(0o600)
    config = (hosts.folder / "ssh_config").read_text().replace(str(hosts.folder / "key"), str(tmp_path / "other"))
    (tmp_path / "ssh_config").write_text(config)
    code, output = launch("steps=30", f"cluster.ssh=[ssh,-F,{tmp_path}/ssh_config]").end()
    assert code == 2
    assert "h1: " in output
    assert "root@h1: Permission denied" in output
    assert not list((tmp_path / "project").rglob("run_manifest.json"))


def test_other_code_on_a_host_is_an_error_that_names_it(launch: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    change = "[ $(hostname) = h2 ] && echo '# changed' >> ../worldsize/recipes/digits/recipe.py"
    python.write_text(f'#!/bin/sh\n{change}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, output = launch("steps=3", f"cluster.python={python}").end()
    assert code == 2
    assert "the hosts differ: h2 (node 1) has code " in output
    (attempt,) = json.loads((folder_of(tmp_path) / "run_manifest.json").read_text())["attempts"]
    assert (attempt["exit_reason"], attempt["failure"]["role"]) == ("failed", "launcher")
    assert attempt["failure"]["cause"].startswith("the hosts differ: h2 (node 1) has code ")
