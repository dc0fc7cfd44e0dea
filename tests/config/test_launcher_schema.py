"""The keys of a launcher are derived from its dataclass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

import pytest
from omegaconf import OmegaConf

from tests.config.golden import REPOSITORY
from worldsize.config.instantiate import Allowed, resolve_target
from worldsize.config.launcher_schema import cluster_schema, launcher_schema
from worldsize.config.schema import ClusterSchema
from worldsize.config.section import plain_type
from worldsize.core.launcher import OF_CLUSTER, cluster_option

CLUSTERS = sorted(path.stem for path in (REPOSITORY / "conf" / "cluster").glob("*.yaml"))
ALSO_OF_LAUNCHERS = {"port"}  # keys common to clusters and launchers, with the same meaning


@dataclass(frozen=True)
class Made:
    first: str = cluster_option()
    options: Mapping[str, Any] = cluster_option({})
    port: int | None = cluster_option(None)  # a key of every cluster
    words: Sequence[str] = ("sky",)


def test_each_field_is_a_key_of_the_launcher_or_a_reference_to_the_cluster() -> None:
    launcher = OmegaConf.structured(launcher_schema(Made))
    assert OmegaConf.to_container(launcher) == {
        "_target_": f"{__name__}.Made",
        "first": "${cluster.first}",
        "options": "${cluster.options}",
        "port": "${cluster.port}",
        "words": ["sky"],
    }
    cluster = OmegaConf.structured(cluster_schema(Made))
    assert OmegaConf.is_missing(cluster, "first")
    assert (cluster.options, cluster.port) == ({}, None)


@pytest.mark.parametrize(
    ("hint", "plain"),
    [
        (int, int),
        (str | None, str | None),
        (Sequence[str], list[str]),
        (Sequence[Mapping[str, str]], list[dict[str, str]]),
        (Mapping[str, Any] | None, dict[str, Any] | None),
        (Literal["a", "b"], str),
        (int | str, int | str),
        (str | Mapping[str, Any], Any),
        (complex, Any),
    ],
)
def test_an_annotation_becomes_a_type_that_is_checked(hint: Any, plain: Any) -> None:
    assert plain_type(hint) == plain


@dataclass(frozen=True)
class Clashing:
    links: bool = cluster_option(False)
    port: int = cluster_option(29500)


def clashes(launcher: type) -> set[str]:
    """Return the cluster options of ``launcher`` that clash with a key of every cluster."""
    every = {each.name: each.default for each in fields(ClusterSchema)}
    means, own = get_type_hints(ClusterSchema), get_type_hints(launcher)
    return {
        each.name
        for each in fields(launcher)
        if each.metadata.get(OF_CLUSTER) and each.name in every
        if each.name not in ALSO_OF_LAUNCHERS
        or (plain_type(own[each.name]), each.default) != (plain_type(means[each.name]), every[each.name])
    }


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_option_of_a_launcher_is_a_key_of_every_cluster_with_another_meaning(cluster: str) -> None:
    """``cluster.NAME`` is one key: the launcher would receive the cluster's value instead of its own option."""
    target = OmegaConf.load(REPOSITORY / "conf" / "cluster" / f"{cluster}.yaml").launcher._target_
    assert not clashes(resolve_target(target, Allowed(), cluster))


def test_an_option_of_a_launcher_that_is_a_key_of_every_cluster_is_found_by_its_type_and_default() -> None:
    assert clashes(Made) == set()
    assert clashes(Clashing) == {"links", "port"}


def test_composing_a_cluster_imports_no_torch() -> None:
    """The import takes seconds, on every `--cfg job`, `--help` and misspelt option."""
    code = (
        "import sys; from worldsize.config.compose import compose_and_call\n"
        "for cluster in sys.argv[1:]:\n"
        "    words = [f'cluster={cluster}', 'cluster.name=other']\n"
        "    compose_and_call(lambda cfg: print(cluster, 'torch' in sys.modules), words)"
    )
    command = [sys.executable, "-c", code, *CLUSTERS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{cluster} False" for cluster in CLUSTERS]
