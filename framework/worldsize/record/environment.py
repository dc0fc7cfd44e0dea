"""Capture a run's software and hardware.

CUDA is not initialized, since this process will fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from worldsize.record.redaction import remove_credentials

_VARIABLES = re.compile(
    r"(ATEN_CPU_CAPABILITY|OMP_NUM_THREADS|OMP_WAIT_POLICY|MKL_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|CUDA_VISIBLE_DEVICES"
    r"|GLOO_SOCKET_IFNAME|PYTHONHASHSEED|GOMP_SPINCOUNT|SLURM_JOB_ID|SKYPILOT_TASK_ID|NCCL_\w+|TORCH_\w+|PYTORCH_\w+|TORCHINDUCTOR_\w+)"
)
_HIDDEN = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_DRIVER = Path("/proc/driver/nvidia")


def capture_environment() -> dict[str, Any]:
    """Return the versions of all software, and the CPU's vector instructions."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "packages": packages(),
        "torch": _describe_torch(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "driver": _read_driver_version(),
    }


def packages() -> dict[str, str]:
    """Return the versions of all installed packages, keyed by normalized name."""
    return {name: version for name, (version, _) in _list_installed().items()}


def _list_installed() -> Mapping[str, tuple[str, metadata.Distribution]]:
    """Return version and distribution by normalized name, sorted; of duplicates, the first."""
    return _scan_distributions(tuple(sys.path))


@cache
def _scan_distributions(path: Sequence[str]) -> Mapping[str, tuple[str, metadata.Distribution]]:
    packages: dict[str, tuple[str, metadata.Distribution]] = {}
    for each in metadata.distributions(path=list(path)):
        facts = _read_header(each)
        if "Name" in facts and "Version" in facts:  # missing after an interrupted uninstall
            packages.setdefault(re.sub(r"[-_.]+", "-", facts["Name"]).lower(), (facts["Version"], each))
    return dict(sorted(packages.items()))


def _read_header(distribution: metadata.Distribution) -> dict[str, str]:
    """Return name and version, skipping the long description that takes 1 ms to parse."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    header = re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    return dict(re.findall(r"^(Name|Version):[ \t]*(.*?)\s*$", header, re.MULTILINE))


def _describe_torch() -> dict[str, Any]:
    nccl = torch.cuda.nccl.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    return {
        "version": torch.__version__,
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        # torch.backends.cudnn.version() would query the device's capability, which initializes CUDA
        "cudnn": ".".join(map(str, torch._C._cudnn.getCompileVersion())) if torch.version.cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def _read_driver_version() -> str | None:
    version = _DRIVER / "version"
    return version.read_text().splitlines()[0] if version.exists() else None


def hardware() -> dict[str, Any]:
    """Return this host's name, CPU, usable cores, memory in bytes, and GPUs."""
    return {
        "host": socket.gethostname(),
        "cpu": _read_cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": sorted(_read_gpu_name(path) for path in _DRIVER.glob("gpus/*/information")),
    }


def _read_cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor()


def _read_gpu_name(information: Path) -> str:
    named = re.search(r"Model:\s*(.+)", information.read_text())
    return named[1].strip() if named else "unknown"


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can change results (allow-list), without secrets."""
    kept = (name for name in environ if _VARIABLES.fullmatch(name) and not _HIDDEN.search(name))
    return {name: remove_credentials(environ[name]) for name in sorted(kept)}


def write_environment(folder: Path, project: Path, clean: Callable[[str], str]) -> str:
    """Write scrubbed files for rebuilding the environment; return the SHA-256 of the lock.

    These are the files of ``project`` for uv if it has a ``uv.lock``, otherwise a list of all installed packages.
    """
    folder.mkdir()
    described = {"python": platform.python_version(), "platform": platform.platform(), "executable": sys.executable}
    (folder / "python.json").write_text(json.dumps(described, indent=2) + "\n")
    lock = project / "uv.lock"
    if lock.exists():
        for name in ("uv.lock", "pyproject.toml", ".python-version"):
            if (project / name).exists():
                _copy_scrubbed(project / name, folder / name, clean)
        return hashlib.sha256((folder / "uv.lock").read_bytes()).hexdigest()
    pins = clean("".join(f"{_format_pin(name, *facts)}\n" for name, facts in _list_installed().items()))
    (folder / "requirements.txt").write_text(pins)
    return hashlib.sha256(pins.encode()).hexdigest()


def _copy_scrubbed(source: Path, target: Path, clean: Callable[[str], str]) -> None:
    """Copy a file, removing secrets and credentials in URLs, e.g. of package indexes."""
    target.write_bytes(clean(remove_credentials(source.read_bytes().decode())).encode())


def _format_pin(name: str, version: str, distribution: metadata.Distribution) -> str:
    """Return ``name==version``, or ``name @ URL`` if installed from a URL (PEP 610)."""
    origin = distribution.read_text("direct_url.json")
    if origin is None:
        return f"{name}=={version}"
    facts = json.loads(origin)
    url = remove_credentials(facts["url"])
    if vcs := facts.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    part = f"#subdirectory={facts['subdirectory']}" if "subdirectory" in facts else ""
    return f"{name} @ {url}{part}"
