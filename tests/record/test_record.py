"""Code, environment, data and manifest of a run are recorded, with real repositories and real processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from worldsize.core import Outcome
from worldsize.errors import WorldsizeError
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.record.environment import capture_environment, relevant_variables, write_environment
from worldsize.record.inputs import check_data, fingerprint, link_data
from worldsize.record.manifest import read_manifest, write_manifest
from worldsize.record.redaction import is_secret, redact_arguments, redact_tree, remove_credentials
from worldsize.record.run_directory import RunDirectory, is_locked, run_lock
from worldsize.record.run_record import open_record, refresh_run, write_result
from worldsize.seeds import derive_seed, seed_generators


@pytest.mark.parametrize(
    "name", ["api_key", "WANDB_API_KEY", "apiKey", "hub.token", "db-password", "AWS_SECRET", "auth"]
)
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["tokens", "tokenizer", "key", "keyboard", "seed", "author", "max_tokens", "metric_key"]
)
def test_other_names_are_left_alone(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_taken_out_of_configuration_and_command_line() -> None:
    config = {"logger": {"api_key": "x", "url": "https://u:p@host/x"}, "list": [{"token": "y", "tokens": 3}]}
    assert redact_tree(config) == {
        "logger": {"api_key": "<redacted>", "url": "https://host/x"},
        "list": [{"token": "<redacted>", "tokens": 3}],
    }
    assert redact_arguments(["+a.token=z", "lr=1", "u=ssh://me@h/x"]) == [
        "+a.token=<redacted>",
        "lr=1",
        "u=ssh://h/x",
    ]
    assert remove_credentials("git@example.org:a/b") == "git@example.org:a/b"


def test_only_variables_on_the_list_are_recorded() -> None:
    environ = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1", "HOME": "/x", "TORCH_AUTH_TOKEN": "s", "NCCL_KEY": "k"}
    assert relevant_variables(environ) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}


def test_the_environment_names_every_package(tmp_path: Path) -> None:
    recorded = capture_environment()
    torch_version = recorded["packages"]["torch"]
    assert torch_version == torch.__version__.split("+")[0] or torch.__version__ in torch_version
    assert recorded["python"] == ".".join(map(str, sys.version_info[:3]))
    digest = write_environment(tmp_path / "environment", project=tmp_path, clean=str)
    pins = (tmp_path / "environment" / "requirements.txt").read_bytes()
    assert digest == hashlib.sha256(pins).hexdigest()
    assert b"hydra-core==" in pins


def test_capturing_the_environment_leaves_cuda_alone() -> None:
    source = (
        "import torch; from worldsize.record.environment import *; capture_environment(); hardware();"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_a_fingerprint_is_the_files_own_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    recorded = fingerprint({"x/a": tmp_path / "a"})
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4, example "abc"
    assert recorded["files"] == {"x/a": {"size": 3, "sha256": sha256}}
    (tmp_path / "a").write_bytes(b"abd")
    changed = fingerprint({"x/a": tmp_path / "a"})
    assert changed["sha256"] != recorded["sha256"]
    with pytest.raises(
        WorldsizeError, match=rf"'x/a' has changed: recorded .*{sha256}, found .* Restore the file; nothing"
    ):
        check_data(recorded, changed)
    with pytest.raises(WorldsizeError, match=r"found 3 bytes, SHA-256 \w+\. Accept it; nothing was started"):
        check_data(recorded, changed, remedy="Accept it")


def test_a_path_is_recorded_where_it_was_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.chdir(tmp_path)
    relative, absolute = (fingerprint({"a": path}) for path in (Path("a"), tmp_path / "a"))
    assert relative["files"]["a"]["path"] == "a"
    check_data(relative, absolute)


def test_data_that_git_does_not_know_are_linked_into_a_checkout_if_they_are_the_same(tmp_path: Path) -> None:
    then, now, root = tmp_path / "then", tmp_path / "now", tmp_path / "checkout"
    for folder in (then / "data", now / "data", root / "sub"):
        folder.mkdir(parents=True)
    (then / "data" / "a").write_bytes(b"other")
    (now / "data" / "a").write_bytes(b"abc")
    (now / "outside").write_bytes(b"abc")
    sha256 = hashlib.sha256(b"abc").hexdigest()
    files: dict[str, dict[str, object]] = {
        name: {"size": 3, "sha256": sha256, "path": path}
        for name, path in (("a", "data/a"), ("outside", "../../outside"), ("lost", "lost"))
    }
    link_data(
        {"files": {**files, "absolute": {"size": 3, "sha256": sha256}}}, root / "sub", root, [then, now, now / "x"]
    )
    assert (root / "sub" / "data" / "a").resolve() == now / "data" / "a"
    assert sorted(path.name for path in root.rglob("*")) == ["a", "data", "sub"]


def digest(state: dict[str, torch.Tensor]) -> str:
    return state_digest(tensor_digests(state))


def test_the_state_digest_depends_on_every_bit_on_names_and_on_shapes() -> None:
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(1, dtype=torch.int64)}
    changed = {
        "bit": {**state, "w": torch.nextafter(state["w"], torch.tensor(10.0))},
        "name": {"v": state["w"], "b": state["b"]},
        "shape": {**state, "w": state["w"].view(3, 2)},
        "dtype": {**state, "b": torch.tensor(1, dtype=torch.int32)},
    }
    digests = [digest(state), *map(digest, changed.values())]
    assert len(set(digests)) == 5
    assert digest(dict(reversed(state.items()))) == digests[0]
    assert digest({"w": torch.ones(2, dtype=torch.bfloat16)})


def test_streams_are_distinct_and_seeding_reaches_every_generator() -> None:
    seeds = {
        derive_seed(s, p, *i) for s in (0, 1) for p in ("init", "step") for i in ((), (0,), (1,), (1, 0), (10,), (0, 1))
    }
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)

    def draw(seed: int) -> list[float]:
        import random

        import numpy

        seed_generators(seed, torch.device("cpu"))
        return [random.random(), float(numpy.random.rand()), torch.rand(()).item()]

    first = derive_seed(0, "step", 1, 0)
    assert draw(first) == draw(first)
    assert all(a != b for a, b in zip(draw(first), draw(derive_seed(0, "step", 1, 1)), strict=True))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_manifest(tmp_path / "run_manifest.json", {"attempts": [], "results": None})
    return tmp_path


def test_a_manifest_records_its_attempts(run: Path) -> None:
    path = run / "run_manifest.json"
    with open_record(RunDirectory(run)) as record:
        record.begin_attempt([], world_size=3)
        assert read_manifest(path)["attempts"][0]["exit_reason"] == "running"
        write_result(record.directory, {"x": 1})
        record.end_attempt(Outcome("completed", 0))
    manifest = read_manifest(path)
    assert manifest["results"]["x"] == 1
    assert manifest["attempts"][0]["end"] >= manifest["attempts"][0]["start"]
    assert list(json.loads(path.read_text())) == sorted(manifest)
    assert sorted(entry.name for entry in run.iterdir()) == [".lock", "result.json", "run_manifest.json"]


def test_a_manifest_that_cannot_be_understood_is_refused(run: Path) -> None:
    path = run / "run_manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(WorldsizeError, match="schema version 2; .* supports up to 1. Upgrade worldsize"):
        read_manifest(path)
    path.write_text("{")
    with pytest.raises(WorldsizeError, match="is not a run manifest"):
        read_manifest(path)
    with pytest.raises(WorldsizeError, match="cannot be read"):
        read_manifest(run / "nothing")


HOLDER = """
import os, sys
from pathlib import Path
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import open_record
with open_record(RunDirectory(Path(sys.argv[1]))) as record:
    record.begin_attempt([], world_size=1)
    if os.fork() == 0:
        sys.stdin.read()   # a worker that outlives its launcher
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_locked_while_its_launcher_lives_and_reported_killed_afterwards(run: Path) -> None:
    command: list[Any] = [sys.executable, "-c", HOLDER, run]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert is_locked(run)
    assert refresh_run(RunDirectory(run)).exit_reason == "running"
    with pytest.raises(WorldsizeError, match="is already being trained by another process"), run_lock(run):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert not is_locked(run)
    assert refresh_run(RunDirectory(run)).exit_reason == "killed"
    holder.communicate("")  # ends the worker
