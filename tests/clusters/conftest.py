"""Real clusters on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clusters import slurm as real


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Slurm]:
    """Slurm with two nodes."""
    if why := real.missing():
        pytest.skip(why)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    with real.running(tmp_path_factory.mktemp("slurm"), port=17_000 + 100 * number) as cluster:
        yield cluster
