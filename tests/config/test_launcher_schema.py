"""The keys of a launcher are derived from its dataclass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from tests.config.golden import REPOSITORY
from worldsize.config.launcher_schema import cluster_schema, launcher_schema, plain_type
from worldsize.core.launcher import cluster_option

CLUSTERS = sorted(path.stem for path in (REPOSITORY / "conf" / "cluster").glob("*.yaml"))


@dataclass(frozen=True)
class Made:
    first: str = cluster_option()
    options: Mapping[str, Any] = cluster_option({})
    port: int | None = cluster_option(None)  # a key that every cluster has
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


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_composing_a_cluster_imports_no_torch(cluster: str) -> None:
    """The import takes seconds, which every `--cfg job`, `--help` and misspelt option would cost."""
    code = (
        "import sys; from worldsize.config.compose import compose_and_call; "
        "compose_and_call(lambda cfg: print('torch' in sys.modules), sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, f"cluster={cluster}", "cluster.name=other"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
