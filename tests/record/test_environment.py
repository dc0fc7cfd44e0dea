"""Packages, torch and environment variables are recorded without secrets."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from worldsize.record.environment import capture_environment, hardware, relevant_variables, write_environment


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, first on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(site: Path, name: str, version: str, origin: object = None) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if origin:
        (folder / "direct_url.json").write_text(json.dumps(origin))


def pins(tmp_path: Path) -> list[str]:
    write_environment(tmp_path / "environment", project=tmp_path, clean=str)
    return (tmp_path / "environment" / "requirements.txt").read_text().splitlines()


def test_the_recorded_one_of_two_packages_with_one_name_is_the_one_that_is_imported(site: Path, tmp_path: Path) -> None:
    install(site, "NumPy", "0.0.1")
    assert capture_environment()["packages"]["numpy"] == "0.0.1"
    assert [pin for pin in pins(tmp_path) if pin.startswith("numpy==")] == ["numpy==0.0.1"]


def test_names_are_normalised_and_remains_of_uninstalled_packages_are_skipped(site: Path, tmp_path: Path) -> None:
    install(site, "Some_Odd.Name", "1.0")
    (site / "~umpy-1.0.dist-info").mkdir()
    packages = capture_environment()["packages"]
    assert packages["some-odd-name"] == "1.0"
    assert list(packages) == sorted(packages)
    assert not [pin for pin in pins(tmp_path) if "None" in pin]


def test_installed_packages_are_read_once(site: Path, tmp_path: Path) -> None:
    with patch.object(metadata, "distributions", wraps=metadata.distributions) as read:
        capture_environment()
        pins(tmp_path)
    assert read.call_count == 1


def test_a_package_from_a_url_is_pinned_to_it_without_credentials(site: Path, tmp_path: Path) -> None:
    vcs = {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}
    install(site, "a", "1", {"url": "https://u:p@example.org/a.git", "vcs_info": vcs, "subdirectory": "python"})
    install(site, "b", "1", {"url": "file:///src/b", "dir_info": {"editable": True}})
    install(site, "c", "1", {"url": "https://example.org/c.whl?token=t", "archive_info": {}})
    assert [pin for pin in pins(tmp_path) if " @ " in pin and pin[0] in "abc" and pin[1] == " "] == [
        "a @ git+https://example.org/a.git@abc#subdirectory=python",
        "b @ file:///src/b",
        "c @ https://example.org/c.whl?token=<redacted>",
    ]


def test_a_lock_file_is_copied_with_its_project_file_and_without_credentials(tmp_path: Path) -> None:
    lock = b'version = 1\r\nurl = "https://example.org/a.whl"\r\n'
    (tmp_path / "uv.lock").write_bytes(lock)
    (tmp_path / "pyproject.toml").write_text('url = "https://u:p@example.org/simple"\n')
    folder = tmp_path / "environment"
    assert write_environment(folder, project=tmp_path, clean=str) == hashlib.sha256(lock).hexdigest()
    assert (folder / "uv.lock").read_bytes() == lock
    assert (folder / "pyproject.toml").read_text() == 'url = "https://example.org/simple"\n'
    assert sorted(path.name for path in folder.iterdir()) == ["pyproject.toml", "python.json", "uv.lock"]


def test_torch_is_described_without_asking_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a device was queried: a process that forks must not initialise CUDA")

    monkeypatch.setattr("worldsize.record.environment._read_driver_version", lambda: "NVRM version: 1")
    for name in ("is_available", "device_count", "get_device_capability", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert capture_environment()["torch"]["version"] == torch.__version__
    assert hardware()["cores"] >= 1


@pytest.mark.parametrize("name", ["TORCH_API_KEY", "NCCL_KEY", "TORCH_TOKENS", "PYTORCH_PASSWORDS", "TORCH_auth"])
def test_no_variable_that_is_named_like_a_secret_is_recorded(name: str) -> None:
    assert relevant_variables({name: "x", "HOME": "/", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
