"""Podman builds the image of a lock, and a run is re-created in its recorded image.

The base consists of this machine's own files, since the tests may run where images cannot be fetched.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BASE = "localhost/worldsize-test-base"
_FILES = (
    "bin",
    "lib",
    "lib64",
    "usr/lib64",
    "usr/bin",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/git-core",
    "usr/lib/ssl",
    "etc/ssl",
)
_CONF = """
[containers]
netns = "host"
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
pytestmark = pytest.mark.slow


def podman(*words: str, **options: object) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with Python, git and their dependencies; its name with its digest."""
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"root, podman and runc are needed (apt-get install podman runc buildah); missing: {missing}")
    conf = tmp_path_factory.mktemp("podman") / "containers.conf"
    limits = [resource.getrlimit(each)[1] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)]
    files, processes = (1024 if limit == resource.RLIM_INFINITY else min(limit, 30_000) for limit in limits)
    conf.write_text(_CONF.format(files=files, processes=processes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(conf))
        patch.setenv("BUILDAH_ISOLATION", "chroot")  # needs no cgroups
        python = Path(sys.base_prefix)
        own = [name for name in _FILES if Path("/", name).exists()]
        left_out = [f"--exclude={name}" for name in ("site-packages", "test", "__pycache__", "chromium", "*.a")]
        files_of = [
            "tar",
            "-C",
            "/",
            *left_out,
            "-c",
            "--no-recursion",
            "tmp",
            "--recursion",
            *own,
            str(python).lstrip("/"),
        ]
        named = [name for name in ("SSL_CERT_FILE", "PIP_CERT") if name in os.environ]  # from a mirror's own authority
        certificates = [f"--change=ENV {name}={os.environ[name]}" for name in named]
        path = f"--change=ENV PATH={python}/bin:/usr/bin:/bin"
        with subprocess.Popen(files_of, stdout=subprocess.PIPE) as tar:
            podman("import", path, *certificates, "-", BASE, stdin=tar.stdout)
        try:
            podman("run", "--rm", BASE, "python3", "--version")
        except AssertionError as error:
            pytest.skip(f"podman runs nothing here: {error}")
        yield f"{BASE}@{digest(BASE)}"


def digest(image: str) -> str:
    return podman("image", "inspect", "--format={{.Digest}}", image)


def worldsize(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worldsize", *words]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)


def test_the_image_of_a_lock_has_its_environment_and_nothing_private(base: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "tiny"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["idna==3.10"]\n'
    )
    (tmp_path / "train.py").write_text("import idna; print('idna', idna.__version__)\n")
    (tmp_path / ".env").write_text("TOKEN=1\n")
    subprocess.run(["uv", "lock", "--quiet"], cwd=tmp_path, check=True)
    tag = "localhost/worldsize-test-tiny"
    done = worldsize("image", "--base", base, "--build", "podman", "--tag", tag, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    image = done.stdout.split()[-1]
    assert image == f"{tag}@{digest(tag)}"
    assert podman("run", "--rm", image, "python", "train.py") == "idna 3.10"
    assert podman("run", "--rm", image, "ls", "-A").split() == ["pyproject.toml", "train.py", "uv.lock"]


def test_a_run_is_re_created_bit_for_bit_in_the_image_of_its_record(base: str, tmp_path: Path) -> None:
    """The image's python is this environment's, visible through the mounted clone of worldsize."""
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\n"
        f"RUN mkdir -p /opt/bin && printf '#!/bin/sh\\nexec {sys.executable} \"$@\"\\n' > /opt/bin/python"
        " && chmod +x /opt/bin/python\n"
        "ENV PATH=/opt/bin:/usr/bin:/bin\n"
    )
    podman("build", "--quiet", "--tag=localhost/worldsize-test-run", str(tmp_path))
    image = f"localhost/worldsize-test-run@{digest('localhost/worldsize-test-run')}"
    options = ("recipe=digits", "steps=6", "reproducibility=deterministic", "cluster.processes=2", "logger=none")
    trained = worldsize("train", *options, f"run.root={tmp_path}/runs", cwd=REPOSITORY, WORLDSIZE_IMAGE=image)
    assert trained.returncode == 0, trained.stderr
    (manifest,) = (tmp_path / "runs").rglob("run_manifest.json")
    done = worldsize("reproduce", str(manifest), "--container", "podman", "--json", cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "bitwise identical"
    new = json.loads((Path(report["run"]) / "run_manifest.json").read_text())
    assert new["environment"]["image"] == {"name": image, "digest": image.partition("@")[2]}
    assert new["code"]["commit"] == json.loads(manifest.read_text())["code"]["commit"]
