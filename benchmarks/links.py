"""Training on hosts that are network namespaces with shaped links; needs root."""

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
from worldsize.planning.predictor import links_of
from worldsize.testing.hosts import Hosts

REPOSITORY = Path(__file__).parents[1]


@contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """A Python that has imported worldsize already, as the tests have it: four hosts on two cores start in no time."""
    sys.path.append(str(REPOSITORY))
    from tests import warm

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
    """The logged steps of a run by ``cluster=ssh`` on all of ``hosts``, whose interpreter is ``python``."""
    with tempfile.TemporaryDirectory() as runs:
        words = [
            *_cluster(hosts, python),
            *("logger=none", "cluster.threads=1", f"run.root={runs}", "evaluate_every=0"),
            *("recipe.test_bytes=1000", "optimizer=sgd", "checkpoint=none", *options),
        ]
        command = hosts.on(1, [str(python), "train.py", *words])
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(runs).rglob("metrics.jsonl")
        return [each for each in map(json.loads, file.read_text().splitlines()) if each["event"] == "step"]


def examined(hosts: Hosts, *options: str, python: str | Path) -> dict[str, Link]:
    """What the links carry, by ``worldsize doctor``."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "doctor.json"
        words = [*_cluster(hosts, python), "cluster.threads=1", f"run.root={name}/runs", *options]
        command = hosts.on(1, [str(python), "-m", "worldsize", "doctor", "--json", str(report), *words])
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)  # red, where less is declared
        return links_of(report)


def _cluster(hosts: Hosts, python: str | Path) -> list[str]:
    names = ",".join(f"h{host + 1}" for host in range(hosts.count))
    own = (f"cluster.ssh=[{','.join(hosts.ssh)}]", f"cluster.python={python}", "cluster.folder=null")
    return ["+cluster=ssh", f"cluster.hosts=[{names}]", *own]
