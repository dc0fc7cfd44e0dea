"""Launchers start processes in an image given by digest, and the manifest records it."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import Cluster, ConfigError, ContainerImage, Plan, Role
from worldsize.launch.skypilot import SkyPilot
from worldsize.launch.slurm import Slurm

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
CLUSTER = Cluster("slurm", 2, 2, "cpu", "gloo")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return Plan(tmp_path / "runs" / "digits" / "first", CLUSTER, {"worker": Role(2)}, {})


@pytest.mark.parametrize("name", ["trainer@{}", "docker:host.example/a/b@{}", "docker://host.example#a/b:1@{}"])
def test_the_digest_of_an_image_is_the_one_in_its_name(name: str) -> None:
    assert ContainerImage.from_name(name.format(DIGEST)).digest == DIGEST


@pytest.mark.parametrize("name", ["trainer", "trainer:1", "trainer@sha256:0123", "ami-0123", "/nowhere/trainer.sif"])
def test_a_tag_is_no_digest(name: str) -> None:
    assert ContainerImage.from_name(name).digest is None


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "trainer.sqsh"
    for content in (b"one", b"another one"):
        file.write_bytes(content)
        assert ContainerImage.from_name(str(file)).digest == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("launcher", [Slurm, SkyPilot])
def test_a_tag_is_refused_where_a_digest_is_required(launcher: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="image_digest=required: the image trainer:1 is specified without a digest"):
        launcher(image="trainer:1", image_digest="required").check(CLUSTER)
    with pytest.raises(ConfigError, match=r"requires an image\. Set cluster\.image"):
        launcher(image_digest="required").check(CLUSTER)
    launcher(image=f"trainer@{DIGEST}", image_digest="required").check_image()
    with caplog.at_level(logging.WARNING):
        launcher(image="trainer:1").check_image()
        launcher(image="ami-0123").check_image()
    assert caplog.text.count("is specified without a digest") == 2


def test_srun_opens_the_image_with_pyxis(plan: Plan, tmp_path: Path) -> None:
    words = started(Slurm(image="/shared/a b.sqsh", mounts=["/data", "/x:/y"]), plan)
    here, runs = tmp_path / "project", tmp_path / "runs" / "digits"
    assert "--container-image=/shared/a b.sqsh" in words
    assert f"--container-mounts={here}:{here},{runs}:{runs},/data:/data,/x:/y" in words
    assert f"--container-workdir={here}" in words
    assert words[words.index("-m") - 1] == "python"  # the image's interpreter


def test_the_agent_is_started_by_apptainer(plan: Plan, tmp_path: Path) -> None:
    launcher = Slurm(image="/shared/a b.sif", container_runtime="apptainer", gpus_per_node=1, python="/opt/python")
    words = started(launcher, plan)
    first = words.index("apptainer")
    binds = [f"--bind={tmp_path / 'project'}", f"--bind={tmp_path / 'runs' / 'digits'}"]
    options = ["--nv", *binds, f"--pwd={tmp_path / 'project'}"]
    assert words[first : first + 10] == [
        "apptainer",
        "exec",
        *options,
        "/shared/a b.sif",
        "/opt/python",
        "-m",
        "worldsize",
    ]


def started(launcher: Slurm, plan: Plan) -> list[str]:
    """Return srun's words in the job script; they are the same for a healing gang."""
    script = launcher.describe(plan)
    heals = launcher.describe(replace(plan, roles={"worker": Role(2, restart="heal")}))
    words, among = shlex.split(command_of(script)), shlex.split(command_of(heals))
    opened = [word for word in words if word.startswith("--container-")]  # by pyxis: it extends srun's options
    assert [word for word in among if word.startswith("--container-")] == opened
    inside = words.index("-m") - 1 if opened else words.index("apptainer")
    assert among[inside - len(words) :] == words[inside:]
    return words


def command_of(script: str) -> str:
    return script[script.index("\nsrun ") :].partition("&\nstep=")[0].replace("\\\n", " ")


def test_the_manifest_has_the_image_of_a_run_that_was_started_in_one(train: Any) -> None:
    one = ("recipe=digits", "steps=1", "cluster.processes=1")
    run = train(*one, WORLDSIZE_IMAGE=f"trainer@{DIGEST}")
    assert run.json("run_manifest.json")["environment"]["image"] == {"name": f"trainer@{DIGEST}", "digest": DIGEST}
    assert json.loads((train(*one).folder / "run_manifest.json").read_text())["environment"]["image"] is None
