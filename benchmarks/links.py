"""Train on hosts that are network namespaces with shaped links. Requires root."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worldsize.core import Link
from worldsize.plan.predictor import read_links
from worldsize.testing.hosts import Hosts

REPOSITORY = Path(__file__).parents[1]


@contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """Yield the path of a Python with worldsize already imported, so that four hosts on two cores start fast."""
    sys.path.append(str(REPOSITORY))
    from tests.support import warm

    path = folder / "zygote"
    zygote = subprocess.Popen([sys.executable, str(REPOSITORY / "tests" / "zygote.py"), str(path), "-" * 4000])
    try:
        while not path.exists():
            time.sleep(0.005)
        yield warm.interpreter(folder, str(path))
    finally:
        zygote.kill()
        zygote.wait()


def trained_on(hosts: Hosts, *options: str, python: str | Path = sys.executable) -> list[dict[str, Any]]:
    """Train with ``cluster=ssh`` on all ``hosts``, and return the logged steps; ``python``: their interpreter."""
    with tempfile.TemporaryDirectory() as runs:
        words = [
            *_cluster(hosts, python),
            *("logger=none", "cluster.threads=1", f"run.root={runs}", "evaluate_every=0"),
            *("recipe.test_bytes=1000", "optimizer=sgd", "checkpoint=none", *options),
        ]
        command = hosts.wrap_command(1, [str(python), "train.py", *words])
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(runs).rglob("metrics.jsonl")
        return [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == "step"]


def examined(hosts: Hosts, *options: str, python: str | Path) -> dict[str, Link]:
    """Return the links of each tier as measured by ``worldsize doctor``."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "doctor.json"
        words = [*_cluster(hosts, python), "cluster.threads=1", f"run.root={name}/runs", *options]
        command = hosts.wrap_command(1, [str(python), "-m", "worldsize", "doctor", "--json", str(report), *words])
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)  # may fail: links below declaration
        return read_links(report)


def _cluster(hosts: Hosts, python: str | Path) -> list[str]:
    names = ",".join(f"h{host + 1}" for host in range(hosts.count))
    own = (f"cluster.ssh=[{','.join(hosts.ssh)}]", f"cluster.python={python}", "cluster.folder=null")
    return ["+cluster=ssh", f"cluster.hosts=[{names}]", *own]
