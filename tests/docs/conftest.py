"""Clusters for the commands that need one."""

from tests.clusters.conftest import hosts, slurm

__all__ = ["hosts", "slurm"]
