"""Fixtures of real clusters on this machine, each started once per test process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clusters import slurm as real
from worldsize.testing import hosts as namespaces


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Slurm]:
    """A Slurm cluster with two nodes on this machine."""
    if why := real.missing():
        pytest.skip(why)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    with real.running(tmp_path_factory.mktemp("slurm"), port=17_000 + 100 * number) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[namespaces.Hosts]:
    """Two hosts (network namespaces) with a network between them."""
    if why := namespaces.find_missing_requirements():
        pytest.skip(why)
    name = f"ws{os.getpid()}"
    with namespaces.run_hosts(tmp_path_factory.mktemp("hosts"), name=name, count=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[namespaces.Hosts]:
    """Four hosts (network namespaces) with links of 1 Gbit/s."""
    if why := namespaces.find_missing_requirements():
        pytest.skip(why)
    with namespaces.run_hosts(tmp_path_factory.mktemp("four"), name=f"wd{os.getpid()}", count=4) as cluster:
        cluster.shape_links("1gbit")
        yield cluster
