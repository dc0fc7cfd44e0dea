"""Annotated ranges are checked before anything is built, for the framework's fields and a plugin's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from worldsize.config.instantiate import Allowed, build_object, check_node
from worldsize.config.schema import Schema
from worldsize.core import ConfigError, FilePath, FolderName, OneOf, Range
from worldsize.core.limits import check_limits
from worldsize.launch.skypilot import SkyPilot
from worldsize.launch.slurm import Slurm
from worldsize.loop import faults
from worldsize.loop.bit_flips import Flip

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as Mesh


@dataclass(frozen=True)
class Options:
    """Stand for options annotated by a plugin's author."""

    share: Annotated[float, Range(least=0, below=1, hint="0.5 is usual")] = 0.5
    rate: Annotated[float, Range(above=0)] = 0.1
    size: Literal["all"] | Annotated[int, Range(least=1)] = "all"
    norm: Annotated[float | None, Range(above=0, finite=False)] = None
    widths: Sequence[Annotated[int, Range(least=1)]] = ()
    costs: Mapping[str, Annotated[float, Range(least=0)]] | None = None
    kind: Annotated[str, OneOf("slow", "fast")] = "fast"
    sums: Literal["flat", "tree"] = "flat"
    plain: float = 0.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("share", 1.0, "strategy.share=1.0 must be at least 0 and below 1; 0.5 is usual."),
        ("share", math.nan, "strategy.share=nan must be at least 0 and below 1; 0.5 is usual."),
        ("rate", 0, "strategy.rate=0 must be positive."),
        ("rate", math.inf, "strategy.rate=inf must be positive and finite."),
        ("size", 0, "strategy.size=0 must be 1 or more."),
        ("norm", math.nan, "strategy.norm=nan must be positive and not NaN."),
        ("widths", [3, 0], "strategy.widths[1]=0 must be 1 or more."),
        ("costs", {"a": -1.0}, "strategy.costs.a=-1.0 must be 0 or more."),
        ("kind", "fats", "strategy.kind='fats' is unknown; did you mean 'fast'? Available: fast, slow."),
        ("plain", math.nan, "strategy.plain=nan must not be NaN."),
    ],
)
def test_a_plugins_option_outside_its_annotation_is_refused_before_it_is_built(
    name: str, value: Any, message: str
) -> None:
    node = {"_target_": f"{__name__}.Options", name: value}
    with pytest.raises(ConfigError) as refused:
        build_object(node, Options, allowed=Allowed((__name__,)), key="strategy")
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"share": 0, "rate": 1e-300, "norm": math.inf, "widths": [], "costs": {"a": 0}, "kind": "slow"},
        {"size": 10**400, "norm": None, "costs": None, "plain": math.inf},
        {"size": "all", "sums": "tree", "unknown": math.nan},
    ],
)
def test_what_an_annotation_allows_is_taken(values: dict[str, Any]) -> None:
    check_limits(Options, values, key="strategy")


@dataclass(frozen=True)
class Partly:
    """Stand for a plugin that imports a name only for type checkers."""

    mesh: Mesh | None = None
    share: Annotated[float, Range(least=0, below=1)] = 0.5
    many: Annotated[str, OneOf("auto")] | Annotated[int, Range(least=1)] = "auto"


@pytest.mark.parametrize("name", [f"{__name__}.Partly", f"{__name__}.partly"])
def test_a_name_for_type_checkers_alone_takes_the_limits_of_no_other_option(name: str) -> None:
    allowed = Allowed((__name__,))
    check_node({"_target_": name, "share": 0.25}, allowed=allowed, key="strategy")
    with pytest.raises(ConfigError, match=r"strategy.share=1.0 must be at least 0 and below 1"):
        check_node({"_target_": name, "share": 1.0}, allowed=allowed, key="strategy")
    with pytest.raises(ConfigError, match=r"strategy.share='x' has the wrong type: expected float"):
        check_node({"_target_": name, "share": "x"}, allowed=allowed, key="strategy")


@dataclass(frozen=True)
class Unreadable:
    """Stand for a plugin whose limits refer to a class imported only for type checkers."""

    share: Annotated[float | Mesh, Range(least=0, below=1)] = 0.5


Share = Annotated[float, Range(least=0, below=1)]


@dataclass(frozen=True)
class UnreadableAlias:
    """Stand for a plugin that refers to such a class beside an alias with limits."""

    share: Share | Mesh = 0.5


@pytest.mark.parametrize("kind", [Unreadable, UnreadableAlias])
def test_limits_that_cannot_be_read_are_refused_instead_of_forgotten(kind: type) -> None:
    node = {"_target_": f"{__name__}.{kind.__name__}", "share": 1.0}
    with pytest.raises(
        ConfigError,
        match=rf"{kind.__name__}: failed to evaluate the annotation share: .*'Mesh' is not defined\. Import",
    ):
        check_node(node, allowed=Allowed((__name__,)), key="strategy")


def test_a_whole_number_with_an_exponent_is_to_be_written_in_digits() -> None:
    node = {"_target_": "recipes.digits.recipe.Digits", "dropout": 0.0, "make_optimizer": {}}
    with pytest.raises(ConfigError, match=r"expected int\. Write recipe.width=100\.$"):
        check_node({**node, "width": 1e2}, allowed=Allowed(), key="recipe")
    with pytest.raises(ConfigError, match=r"^recipe.width=1.5 has the wrong type: expected int\.$"):
        check_node({**node, "width": 1.5}, allowed=Allowed(), key="recipe")


def partly(mesh: Mesh | None = None, share: Annotated[float, Range(least=0, below=1)] = 0.5) -> None:
    """Stand for a function whose annotations are imported only for type checkers."""


def test_a_word_or_a_number_is_either() -> None:
    for value in ("auto", 3):
        check_limits(Partly, {"many": value}, key="key")
    with pytest.raises(ConfigError, match="key.many='aut' is unknown; did you mean 'auto'"):
        check_limits(Partly, {"many": "aut"}, key="key")
    with pytest.raises(ConfigError, match="key.many=0 must be 1 or more"):
        check_limits(Partly, {"many": 0}, key="key")


@pytest.mark.parametrize("time", ["30", 30, "02:00:00", "90:00", "1-12", "1-12:30:00", "UNLIMITED", None])
def test_a_time_limit_is_one_of_slurms(time: str | int | None) -> None:
    check_limits(Slurm, {"time": time}, key="cluster")
    with pytest.raises(ConfigError, match=r"cluster.time='2h' is not a Slurm time limit"):
        check_limits(Slurm, {"time": "2h"}, key="cluster")


def test_a_fault_is_planted_at_a_point_that_exists() -> None:
    framework = Path(faults.__file__).parents[1]
    folders = (framework, framework.parents[1] / "plugins/parameter_server")
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert {*re.findall(r'\bat\(\s*"([a-z]+:[a-z-]+)"', source)} - {*faults.POINTS} == set()
    assert all(source.count(f'"{point}"') > 1 for point in faults.POINTS)
    assert faults.Faults.from_rows([{"action": "kill", "point": "plugin:anywhere"}]).planned
    with pytest.raises(ConfigError, match="unknown point 'step:forwards'; did you mean 'step:forward'?"):
        faults.Faults.from_rows([{"action": "kill", "point": "step:forwards"}])


def test_a_flip_has_keys_and_targets_of_its_own() -> None:
    flip = {"action": "flip", "target": "gradient", "rank": 1, "step": 3, "bit": 7}
    (planned,) = faults.Faults.from_rows([flip]).planned
    assert planned.flip == Flip("gradient", bit=7)
    for changes, message in (
        ({"target": "gradnt"}, "unknown target 'gradnt' of a flip; did you mean 'gradient'?"),
        ({"point": "step:forward"}, "unknown key 'point'"),
        ({"skp": 1}, "unknown key 'skp'; did you mean 'skip'?"),
        ({"bit": 64}, "faults.bit=64 must be"),
        ({"target": "product", "name": "head"}, "name is not supported for target=product"),
        ({"rank": -1}, "faults.rank=-1 must be"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            faults.Faults.from_rows([{**flip, **changes}])
    with pytest.raises(ConfigError, match="unknown key 'target'"):
        faults.Faults.from_rows([{"action": "kill", "target": "weight"}])


def test_words_of_a_literal_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^key.sums='ring' is unknown. Available: flat, tree.$"):
        check_limits(Options, {"sums": "ring"}, key="key")


def scaled(_: object, *, factor: Annotated[float, Range(least=1)] = 1.0) -> None:
    """Stand for a schedule: a function with annotated arguments."""


def test_arguments_of_a_function_have_limits_too() -> None:
    node = {"_target_": f"{__name__}.scaled", "factor": [1, 2]}
    with pytest.raises(ConfigError, match=r"schedule.factor=\[1, 2\] has the wrong type: expected float"):
        check_node(node, allowed=Allowed((__name__,)), key="schedule")
    with pytest.raises(ConfigError, match="schedule.factor=0.5 must be 1 or more"):
        check_limits(scaled, {"factor": 0.5}, key="schedule")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "-a", "a\\b", "a\0"])
def test_what_no_folder_can_be_called_is_refused(name: str) -> None:
    assert "is not a valid folder name" in str(FolderName().describe_violation(name))
    assert (FilePath().describe_violation(name) is None) == (name != "" and "\0" not in name)


@pytest.mark.parametrize("name", ["mine", "2026-01-01_x", "a b", "..a", "ä"])
def test_other_names_are_taken(name: str) -> None:
    assert FolderName().describe_violation(name) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": math.nan}, "lr=nan must be 0 or more and finite"),
        ({"lr": -0.1}, "lr=-0.1 must be 0 or more"),
        ({"epochs": math.nan}, "epochs=nan must be positive and finite"),
        ({"cluster": {"threads": -1}}, "cluster.threads=-1 must be between 1 and 4,096"),
        (
            {"cluster": {"timeout": 0.0}},
            "cluster.timeout=0.0 must be above 0 and at most 1,000,000,000; the unit is sec",
        ),
        ({"cluster": {"timeout": math.inf}}, "cluster.timeout=inf must be above 0"),
        ({"cluster": {"port": 65536}}, "cluster.port=65536 must be between 1 and 65,535"),
        ({"cluster": {"links": {"node": {"bandwidth": 0.0}}}}, "cluster.links.node.bandwidth=0.0 must be positive"),
        ({"run": {"name": "../up"}}, "run.name='../up' is not a valid folder name"),
        ({"data_workers": 10_000}, "data_workers=10000 must be between 0 and 256"),
        ({"profile": {"steps": [0, 3]}}, r"profile.steps\[0\]=0 must be 1 or more"),
        ({"checkpoint": {"every": -1}}, "checkpoint.every=-1 must be 0 or more; 0 means never"),
    ],
)
def test_the_schema_says_what_its_values_may_be(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_limits(Schema, values, key="")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("use_spot", "Set cluster.spot=true"), ("image_id", "Set cluster.image"), ("cpus", "Set cluster.cpus")],
)
def test_keys_of_skypilots_resources_that_have_a_key_are_refused(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} conflicts with the task's own settings. {remedy} instead\."):
        check_limits(SkyPilot, {"resources": {"disk_size": 300, name: 1}}, key="cluster")
    check_limits(SkyPilot, {"resources": {"disk_size": 300, "instance_type": "a", "any_of": []}}, key="cluster")
