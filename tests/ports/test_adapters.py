"""At most ten lines turn a Lightning or transformers program into a recipe, and it trains as before."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REPOSITORY, blocks, files
from tests.plugins import hf_programs, lightning_gans, lightning_programs
from tests.plugins.hf_reference import trained_by_transformers
from tests.plugins.lightning_reference import fitted
from tests.ports.lines import count_lines
from worldsize.testing import compose_recipe, same_losses

LINES = 10  # written or changed by a user, besides the program
FROM_LIGHTNING, FROM_HUGGING_FACE = (
    REPOSITORY / "docs" / "howto" / f"from-{name}.md" for name in ("lightning", "hugging-face")
)
LIGHTNING = """\
# @package _global_
defaults: [lightning_module, _self_]
epochs: {epochs}
batch_size: 24
recipe: {{module: {program}, datamodule: {data}}}
"""
HUGGING_FACE = """\
# @package _global_
defaults: [hf_trainer, _self_]
epochs: null
steps: 20
lr: 0.001
clip_norm: 0.5
recipe: {{trainer: {program}}}
"""


@dataclass(frozen=True)
class Port:
    """A recipe made from an unchanged program.

    Attributes:
        yaml: The recipe's configuration.
        original: The program's own training, in the form for ``same_losses``.
    """

    yaml: str
    original: Callable[..., Any]


def of_lightning(module: Any, datamodule: Any, *, epochs: int = 5) -> Port:
    program, data = (f"{each.__module__}.{each.__name__}" for each in (module, datamodule))
    return Port(LIGHTNING.format(epochs=epochs, program=program, data=data), fitted(module, steps=4 * epochs))


def of_transformers(make: Callable[..., Any]) -> Port:
    return Port(HUGGING_FACE.format(program=f"{make.__module__}.{make.__name__}"), trained_by_transformers(make))


PORTS = {
    "classifier": of_lightning(lightning_programs.Classifier, lightning_programs.Points),
    "vae": of_lightning(lightning_programs.VAE, lightning_programs.Points),
    "dcgan": of_lightning(lightning_gans.DCGAN, lightning_gans.Images),
    "toggled_gan": of_lightning(lightning_gans.ToggledGAN, lightning_gans.Images),
    "bert": of_transformers(hf_programs.make_classifier),
    "gpt2": of_transformers(hf_programs.make_causal),
    "t5": of_transformers(hf_programs.make_pair),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", PORTS)
def test_a_program_with_its_yaml_trains_as_it_did(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(PORTS[name].yaml)
    monkeypatch.chdir(tmp_path)
    recipe, config = compose_recipe(f"recipe={name}")
    assert config.steps == 20
    same_losses(recipe, PORTS[name].original, config)


@pytest.mark.parametrize("name", PORTS)
def test_the_yaml_of_a_program_has_at_most_ten_lines(name: str) -> None:
    assert count_lines(PORTS[name].yaml) <= LINES


def test_the_trainer_of_the_page_takes_as_many_lines_as_it_says() -> None:
    changed = count_lines(difference(FROM_HUGGING_FACE))
    yaml = count_lines(files(FROM_HUGGING_FACE)["conf/recipe/reviews.yaml"])
    assert f"The file has {yaml} lines; the whole port changes {changed + yaml}." in FROM_HUGGING_FACE.read_text()
    assert changed + yaml <= LINES


def test_the_module_of_the_page_takes_as_many_lines_as_it_says() -> None:
    shown = difference(FROM_LIGHTNING)
    removed = len(re.findall("^-", shown, re.M))
    assert f"a command replaces its {removed} lines" in FROM_LIGHTNING.read_text()
    assert count_lines(shown) <= LINES
    (command,) = [block.text for block in blocks(FROM_LIGHTNING) if "lightning_module" in block.text]
    assert re.findall(r"^\+(.*)$", shown, re.M) == command.splitlines()  # run by tests/docs


def difference(page: Path) -> str:
    """Return the lines that the page removes from a program and adds to it."""
    (shown,) = re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.M | re.S)
    return str(shown)
