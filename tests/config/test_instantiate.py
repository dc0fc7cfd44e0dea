"""``_target_`` must be in the allow-list, and its arguments must fit the signature."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.support.runs import REPOSITORY
from worldsize.config.instantiate import Allowed, build_object, check_targets, find_bundled_targets, resolve_target
from worldsize.config.schema import Schema
from worldsize.config.search_path import get_bundle_folder, make_importable
from worldsize.core import Cluster, ConfigError, Link, Strategy

DDP_TARGET = "worldsize.strategies.ddp.DDP"
ALL = Allowed((*Allowed().prefixes, "worldsize"))  # as with allow_targets=[worldsize]


def make(node: dict[str, Any], allowed: Allowed | None = None) -> Strategy:
    return build_object(node, Strategy, allowed=allowed or Allowed(), key="strategy")  # type: ignore[type-abstract]


def test_a_nested_target_is_built() -> None:
    link = {"_target_": "worldsize.core.Link", "bandwidth": 1e9, "latency": 1e-5}
    shape = {"name": "two", "nodes": 1, "processes": 2, "device": "cpu", "backend": "gloo"}
    node = {"_target_": "worldsize.core.Cluster", **shape, "links": {"node": link}}
    built = build_object(node, Cluster, allowed=ALL, key="cluster")
    assert built == Cluster("two", 1, 2, "cpu", "gloo", links={"node": Link(1e9, 1e-5)})


def test_a_misspelt_class_is_told_with_those_of_its_module_and_not_with_what_that_imports() -> None:
    with pytest.raises(ConfigError, match="did you mean 'DDP'") as refused:
        make({"_target_": "worldsize.strategies.ddp.DPD"}, ALL)
    known = str(refused.value).partition("Available: ")[2].rstrip(".").split(", ")
    assert "DDP" in known
    assert not {"Mapping", "annotations", "torch", "Strategy"} & {*known}
    with pytest.raises(ConfigError, match="did you mean 'Linear'"):  # a package includes the classes of its modules
        make({"_target_": "torch.nn.Lineer"})


@pytest.mark.parametrize(
    "target", ["os.system", "builtins.eval", "subprocess.run", "torchx.nn.Linear", "worldsizes.x", 3]
)
def test_a_target_outside_the_allow_list_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"outside the allow-list\. Allowed: .* Extend the allow-list with"):
        make({"_target_": target})


@pytest.mark.parametrize(
    "target", ["worldsize.worker.process.os.system", "worldsize.record.run_directory.shutil.rmtree"]
)
def test_an_alias_of_something_outside_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="outside the allow-list"):
        make({"_target_": target}, ALL)


@pytest.mark.parametrize(
    "text",
    ["${oc.create:{_target_:os.getcwd}}", "a ${oc.env:HOME}", "\\${x}"],
    ids=["a target", "a variable", "escaped"],
)
def test_a_text_that_hydra_would_resolve_is_refused(text: str) -> None:
    for value in (text, [text], {"a": {text: 1}}):
        with pytest.raises(ConfigError, match=r"^strategy\..*: arguments must not contain"):
            make({"_target_": "worldsize.strategies.ddp.DDP", "compress": value}, ALL)


def test_a_refused_target_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\ndef run(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"recipe.deep\[0\]"):
        check_targets({"recipe": {"deep": [{"_target_": "planted.run"}]}}, Allowed())
    assert "planted" not in sys.modules
    assert not (tmp_path / "canary").exists()


def test_a_user_may_add_to_the_allow_list() -> None:
    allowed = Allowed((*Allowed().prefixes, "fractions"))
    with pytest.raises(ConfigError, match="must return Strategy, got Fraction"):
        make({"_target_": "fractions.Fraction", "numerator": 1}, allowed)


def test_a_target_that_does_not_exist_names_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="did you mean 'worldsize.strategies.ddp.DDP'"):
        make({"_target_": "worldsize.strategies.ddp.DPD"})


@pytest.mark.parametrize(
    "target",
    [
        "worldsize.cli.logs._show_command_output",  # runs any command
        "worldsize.launch.local.Local.launch",
        "worldsize.core.Cluster",
        "recipes.digits.recipe._anything",
        "torch.nn.functional.relu",
        "torch.nn.Module.register_forward_hook",
        "torch.optim._functional.adam",
        "torch.nn.modules.linear._LinearWithBias",
    ],
)
def test_only_what_a_configuration_may_name_is_built(target: str) -> None:
    with pytest.raises(ConfigError, match="outside the allow-list|does not exist"):
        make({"_target_": target})


def targets_in(node: Any) -> Iterator[str]:
    """Yield all targets in a parsed YAML file, except those under other keys."""
    if isinstance(node, dict) and "$" not in (target := node.get("_target_", "$")):
        yield target
    for child in [*node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []:
        yield from targets_in(child)


def test_the_bundled_targets_are_those_of_all_bundled_files_and_of_the_schema() -> None:
    folders = [REPOSITORY / "conf", *REPOSITORY.glob("plugins/*/conf"), *REPOSITORY.glob("recipes/*/conf")]
    files = [file for folder in folders for file in folder.rglob("*.yaml")]
    named = {target for file in files for target in targets_in(yaml.safe_load(file.read_text()))}
    assert find_bundled_targets() == named | {*targets_in(OmegaConf.to_container(OmegaConf.structured(Schema)))}


def test_every_target_of_the_bundled_files_is_admitted_and_exists() -> None:
    make_importable([get_bundle_folder()])
    for target in find_bundled_targets():
        assert callable(resolve_target(target, Allowed(), "key")), target


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor", "lr_scheduler.CosineAnnealingLR"])
def test_classes_of_torch_are_admitted_wherever_torch_defines_them(name: str) -> None:
    assert resolve_target(f"torch.optim.{name}", Allowed(), "optimizer")


def test_a_module_of_the_users_may_show_what_a_private_one_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shown_by"
    folder.mkdir()
    (folder / "_private.py").write_text("class Own:\n    pass\n\n\ndef _hidden(): ...\n")
    (folder / "__init__.py").write_text(
        "from shown_by._private import Own, _hidden\nfrom worldsize.cli.logs import _show_command_output as shown\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allowed = Allowed((*Allowed().prefixes, "shown_by"))
    assert resolve_target("shown_by.Own", allowed, "recipe")
    for refused in ("shown_by._hidden", "shown_by.shown", "shown_by._private.Own"):
        with pytest.raises(ConfigError, match="outside the allow-list"):
            resolve_target(refused, allowed, "recipe")


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="plugins.nowhere.strategy.S does not exist"):
        make({"_target_": "plugins.nowhere.strategy.S"})


def test_a_module_whose_own_import_fails_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plugins" / "broken_one"
    folder.mkdir(parents=True)
    (folder / "strategy.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        make({"_target_": "plugins.broken_one.strategy.S"})


def test_an_unknown_parameter_names_its_neighbour() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'strategy.bucket'; did you mean 'bucket_mb'\? Available: bucket_mb, "
    ):
        make({"_target_": DDP_TARGET, "bucket": 3})


@pytest.mark.parametrize(("value", "accepted"), [(3, True), (2.5, True), ("big", False), (True, False), (None, False)])
def test_a_plain_value_is_checked_against_its_annotation(value: Any, accepted: bool) -> None:
    node = {"_target_": DDP_TARGET, "bucket_mb": value}
    if accepted:
        make(node)
    else:
        with pytest.raises(ConfigError, match="strategy.bucket_mb=.* has the wrong type: expected float"):
            make(node)
