"""A Dockerfile has the lock's environment without secrets; a run is re-created in its recorded image."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from worldsize.cli.image import image
from worldsize.core import ContainerImage
from worldsize.errors import WorldsizeError
from worldsize.record.container import (
    Container,
    Dockerfile,
    engines_for,
    extend_environment,
    find_engine,
    read_recorded_image,
)

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
LOCK = (
    'version = 1\nrequires-python = ">=3.11"\n\n[[package]]\nname = "mine"\nversion = "1"\nsource = { virtual = "." }\n'
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "uv.lock").write_text(LOCK)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\n')
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def dockerfile(folder: Path, **values: object) -> Dockerfile:
    return Dockerfile(folder, f"python@{DIGEST}", "3.11.2", "0.9.1", **values)  # type: ignore[arg-type]


def test_the_environment_is_that_of_the_lock_on_the_base_that_was_named(project: Path) -> None:
    lines = dockerfile(project, extras=["data", "report"]).write_files().read_text().splitlines()
    assert f"FROM python@{DIGEST}" in lines
    assert f"LABEL worldsize.lock=sha256:{hashlib.sha256(LOCK.encode()).hexdigest()}" in lines
    (first, second) = [line.partition("uv sync")[2] for line in lines if "uv sync" in line]
    assert second == " --no-cache --frozen --extra data --extra report"
    assert first == f"{second} --no-install-project"
    assert lines.index("COPY pyproject.toml uv.lock ./") < lines.index("COPY . .")
    whole = dockerfile(project, extras=None, has_project=False).write_files().read_text()
    assert "--all-extras" in whole
    assert "COPY . ." not in whole


def test_pins_are_installed_where_there_is_no_lock(project: Path) -> None:
    (project / "uv.lock").rename(project / "requirements.txt")
    assert "uv pip install" in dockerfile(project).write_files().read_text()
    (project / "requirements.txt").unlink()
    with pytest.raises(WorldsizeError, match="neither uv.lock nor requirements.txt"):
        dockerfile(project).write_files()


@pytest.mark.parametrize("in_git", [True, False])
def test_private_and_ignored_files_do_not_get_into_the_image(project: Path, in_git: bool) -> None:
    token = "hf_" + "aB" * 17
    for name, text in {
        ".env": "A=1",
        "secret_sharing.py": "x = 1",
        "notes.txt": f"mine is {token}",
        "[odd].txt": f"mine is {token}",
        "data/big.bin": "0",
        "plain.txt": "hello",
    }.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    if in_git:
        (project / ".gitignore").write_text("data/\n")
        subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    dockerfile(project).write_files()
    lines = (project / "Dockerfile.dockerignore").read_text().splitlines()
    assert {"**/.env*", "notes.txt", r"\[odd\].txt", "**/.git", "**/.venv", "**/runs"} <= {*lines}
    assert not {"plain.txt", "train.py", "secret_sharing.py"} & {*lines}
    assert lines.index("**/*secret*") < lines.index("!**/*.py") < lines.index("**/.venv")  # the last one counts
    assert ("data" in lines) == in_git


def test_a_lock_with_credentials_or_with_packages_from_elsewhere_is_refused(project: Path) -> None:
    (project / "pyproject.toml").write_text('[[tool.uv.index]]\nurl = "https://me:word@packages.example/simple"\n')
    with pytest.raises(WorldsizeError, match="contains credentials in a URL"):
        dockerfile(project).write_files()
    (project / "pyproject.toml").write_text("")
    (project / "uv.lock").write_text(f'{LOCK}\n[[package]]\nname = "other"\nsource = {{ editable = "../other" }}\n')
    with pytest.raises(WorldsizeError, match=r"installs other \(\.\./other\) from outside"):
        dockerfile(project).write_files()
    assert not (project / "Dockerfile").exists()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.dockerignore"])
def test_a_file_of_the_project_is_not_replaced_and_one_of_ours_is(project: Path, name: str) -> None:
    (project / name).write_text("FROM scratch\n")
    with pytest.raises(WorldsizeError, match=f"{name} was not written by `worldsize image` and would be overwritten"):
        dockerfile(project).write_files()
    assert (project / name).read_text() == "FROM scratch\n"
    (project / name).unlink()
    dockerfile(project).write_files()
    (project / "uv.lock").write_text(f"{LOCK}\n")
    label = f"LABEL worldsize.lock=sha256:{hashlib.sha256((project / 'uv.lock').read_bytes()).hexdigest()}"
    assert label in dockerfile(project).write_files().read_text()


def test_the_image_of_a_record_is_opened_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_recorded_image({"image": None}) is None
    for start in ("host.example/", "docker:host.example/", "host.example#"):
        name = f"{start}trainer@{DIGEST}"
        image = read_recorded_image({"image": {"name": name, "digest": DIGEST}})
        assert image == ContainerImage(f"host.example/trainer@{DIGEST}", DIGEST)
    file = tmp_path / "trainer.sif"
    file.write_bytes(b"image")
    facts = {"image": {"name": str(file), "digest": f"sha256:{hashlib.sha256(b'image').hexdigest()}"}}
    assert read_recorded_image(facts) == ContainerImage(str(file), facts["image"]["digest"])
    container = Container("apptainer", ContainerImage(str(file), facts["image"]["digest"]))
    assert container.build_python_command(tmp_path, writes=[], reads=[], cuda=False)[-2:] == (str(file), "python")
    monkeypatch.chdir(tmp_path)
    relative = {"image": {**facts["image"], "name": "trainer.sif"}}
    assert read_recorded_image(relative) == container.image  # it is opened in a different working directory
    time_ns = file.stat().st_mtime_ns
    file.write_bytes(b"other")
    os.utime(file, ns=(time_ns, time_ns))
    with pytest.raises(WorldsizeError, match="differs from the run's image"):
        container.build_python_command(tmp_path, writes=[], reads=[], cuda=False)
    with pytest.raises(WorldsizeError, match="differs from the run's image"):
        read_recorded_image(facts)


@pytest.mark.parametrize(
    ("name", "digest", "message"),
    [
        ("trainer:1", None, "specified by a tag, which may have moved"),
        ("trainer:1", DIGEST, "specified by a tag, which may have moved"),
        (f"trainer@{DIGEST[:-1]}e", DIGEST, "specified by a tag, which may have moved"),
        (f"trainer@{DIGEST}:1", DIGEST, "specified by a tag, which may have moved"),
        (f"/nowhere@{DIGEST}/trainer.sif", DIGEST, "is missing or differs from the run's image"),
        (f"--privileged@{DIGEST}", DIGEST, "no container engine can open"),
        (f"trainer {DIGEST}", DIGEST, "no container engine can open"),
        (f"ssh://trainer@{DIGEST}", DIGEST, "no container engine can open"),
    ],
)
def test_an_image_that_is_not_certain_or_is_none_is_refused(name: str, digest: str | None, message: str) -> None:
    with pytest.raises(WorldsizeError, match=message):
        read_recorded_image({"image": {"name": name, "digest": digest}})


def test_a_container_sees_the_folders_under_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "word")
    for name in ("code", "runs", "data", "runs/inner"):
        (tmp_path / name).mkdir()
    image = ContainerImage(f"trainer@{DIGEST}", DIGEST)
    code, runs, data = (tmp_path / name for name in ("code", "runs", "data"))
    where = {"writes": [code, runs, runs / "inner"], "reads": [data, code, tmp_path / "nowhere"], "cuda": False}
    words = Container("podman", image).build_python_command(code, **where)  # type: ignore[arg-type]
    mounts = [word for word in words if word.startswith("--volume")]
    assert mounts == [f"--volume={code}:{code}:rw", f"--volume={runs}:{runs}:rw", f"--volume={data}:{data}:ro"]
    assert words[-2:] == ("--entrypoint=python", f"trainer@{DIGEST}")
    assert not [word for word in words if "word" in word]  # without a value on the command line
    assert Container("podman", image).variables == {"WORLDSIZE_IMAGE": f"trainer@{DIGEST}"}
    words = Container("apptainer", image).build_python_command(code, **{**where, "cuda": True})  # type: ignore[arg-type]
    assert words[:6] == ("apptainer", "exec", "--containall", "--no-home", "--cleanenv", "--nv")
    assert words[-2:] == (f"docker://trainer@{DIGEST}", "python")


@pytest.mark.parametrize("engine", ["apptainer", "docker"])
def test_a_folder_that_may_be_read_does_not_hide_one_inside_it_that_may_be_written(tmp_path: Path, engine: str) -> None:
    inner, code = tmp_path / "data" / "deep" / "runs", tmp_path / "data" / "code"
    for folder in (inner, code):
        folder.mkdir(parents=True)
    words = Container(engine, ContainerImage(f"trainer@{DIGEST}", DIGEST)).build_python_command(
        code, writes=[inner, code], reads=[tmp_path / "data"], cuda=False
    )
    shown = [word.split(":")[1:] for word in words if word.startswith(("--bind=", "--volume="))]
    assert shown == [[str(tmp_path / "data"), "ro"], [str(code), "rw"], [str(inner), "rw"]]


def test_apptainer_gets_the_variables_that_the_other_engines_are_told_by_name() -> None:
    environment = {"WANDB_API_KEY": "word", "PYTHONPATH": "/code", "AWS_SECRET_ACCESS_KEY": "word", "HOME": "/root"}
    told = extend_environment(("apptainer", "exec"), environment)
    assert {*told} - {*environment} == {"APPTAINERENV_WANDB_API_KEY", "APPTAINERENV_PYTHONPATH"}
    assert told["APPTAINERENV_PYTHONPATH"] == "/code"
    assert extend_environment(("podman", "run"), environment) == environment


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorldsizeError, match=r"no container engine found. Install one of: podman, docker, apptainer"):
        find_engine("auto")
    (tmp_path / "docker").touch(mode=0o755)
    assert find_engine("auto") == "docker"
    assert engines_for(ContainerImage("trainer.sif", DIGEST)) == ("apptainer",)
    with pytest.raises(WorldsizeError, match="apptainer cannot build or open this image. Use podman or docker"):
        find_engine("apptainer", engines_for(None))


def test_an_image_has_the_name_of_its_folder_as_engines_take_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, tools = tmp_path / "Thesis (final) 2", tmp_path / "tools"
    for each in (folder, tools):
        each.mkdir()
    for name in ("uv.lock", "pyproject.toml"):
        (project / name).rename(folder / name)
    (tools / "docker").write_text(f'#!/bin/sh\n[ "$1" = image ] && echo "[{{}}]" || echo "$@" > {tmp_path}/said\n')
    (tools / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    image(argparse.Namespace(folder=folder, base="python:3.11-slim", extra=[], build="docker", tag=None, option=[]))
    assert " --tag=thesis-final-2 " in (tmp_path / "said").read_text()
    assert capfd.readouterr().out.splitlines() == [str(folder / "Dockerfile"), "thesis-final-2"]
