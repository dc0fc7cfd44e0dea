"""Options of groups are chosen with or without a plus, from any source of the group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from worldsize.config.command_line import REFUSED_FLAGS
from worldsize.config.compose import compose_and_call, compose_only, task_overrides, wants_sweep
from worldsize.config.composed import build_settings
from worldsize.core import ConfigError

FILES = {
    "experiment/short": "# @package _global_\nsteps: 3\n",
    "experiment/long": "# @package _global_\nsteps: 9\n",
    "experiment/text": "# @package _global_\ndefaults: [override /recipe: stdlib_lm]\nsteps: 4\n",
    "dressing/plain": "# @package recipe\nwidth: 5\n",
    "size/of/small": "# @package _global_\nbatch_size: 2\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def composed(*words: str) -> list[Any]:
    found: list[Any] = []
    compose_and_call(found.append, words)
    return found


@pytest.mark.parametrize("sign", ["", "+"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["experiment=short"], {"steps": 3}),
        (["experiment=[short,long]"], {"steps": 9}),
        (["experiment=long", "recipe=stdlib_lm", "model=small"], {"steps": 9, "recipe.width": 512}),
        (["model=small", "experiment=text"], {"steps": 4, "recipe.width": 512}),
        (["dressing=plain", "experiment=short"], {"steps": 3, "recipe.width": 5}),
        (["size/of=small"], {"batch_size": 2}),
        (["strategy=ddp", "experiment=short", "steps=7"], {"steps": 7}),
    ],
)
def test_an_option_of_any_group_is_chosen_with_or_without_a_plus(
    words: Sequence[str], expected: dict[str, Any], sign: str
) -> None:
    signed = [word if word.startswith("steps") else sign + word for word in words]
    for cfg in (*composed(*signed), compose_only(signed)):
        assert {key: OmegaConf.select(cfg, key) for key in expected} == expected


def test_a_sweep_over_experiments_needs_no_plus() -> None:
    assert [cfg.steps for cfg in composed("--multirun", "experiment=short,long", "seed=1,2")] == [3, 3, 9, 9]


def test_what_is_recorded_composes_again() -> None:
    words: list[str] = []
    compose_and_call(lambda cfg: words.extend(task_overrides()), ["experiment=short", "seed=5"])
    assert words == ["+experiment=short", "seed=5"]
    (cfg,) = composed(*words)
    assert (cfg.steps, cfg.seed) == (3, 5)


def test_an_error_of_hydra_without_a_message_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError

    monkeypatch.setattr("hydra.main", lambda **_: lambda task: fail)
    with pytest.raises(ConfigError, match=r"^Hydra failed to parse the arguments: ValueError\.$"):
        compose_and_call(lambda cfg: None, ["--multirun", "seed=1,2"])


@pytest.mark.parametrize("words", [[], ["experiment=text", "seed=5"], ["~schedule", "+sweep.a=1"]])
def test_a_single_run_has_the_configuration_that_hydras_command_line_gives(words: Sequence[str]) -> None:
    def seen(*flags: str) -> list[Any]:
        found: list[Any] = []
        said = [*flags, *words, "hydra.job.name=app"]  # the default is the module of the function below
        compose_and_call(lambda cfg: found.extend([cfg, OmegaConf.to_container(HydraConfig.get())]), said)
        found[1]["mode"] = None  # Hydra's command line names it, and among the overrides
        found[1]["overrides"]["hydra"] = [word for word in found[1]["overrides"]["hydra"] if "mode" not in word]
        return found

    assert seen() == seen("--run")


def test_hydra_is_asked_for_what_only_its_command_line_does(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OF_THE_JOB", raising=False)
    values = [os.environ.get("OF_THE_JOB") for _ in composed()]
    compose_and_call(lambda cfg: values.append(os.environ.get("OF_THE_JOB")), ["+hydra.job.env_set.OF_THE_JOB=x"])
    assert values == [None, "x"]
    sweep = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n"
    (project / "conf" / "experiment" / "swept.yaml").write_text(sweep)
    assert [cfg.seed for cfg in composed("experiment=swept")] == [1, 2]


def test_a_group_of_an_additional_folder_needs_no_plus(tmp_path: Path) -> None:
    (tmp_path / "more" / "trial").mkdir(parents=True)
    (tmp_path / "more" / "trial" / "one.yaml").write_text("# @package _global_\nseed: 11\n")
    assert [cfg.seed for cfg in composed("--config-dir", str(tmp_path / "more"), "trial=one")] == [11]


@pytest.mark.parametrize(
    ("group", "text", "key"),
    [
        ("strategy", "# x\n_target_: worldsize.strategies.ddp.DDP\nbucket_md: 3\n", "'strategy.bucket_md'"),
        ("experiment", "# @package _global_\nstrategy: {bucket_md: 3}\n", "'strategy.bucket_md'"),
        ("experiment", "# @package _global_\nstepz: 3\n", "'stepz'"),
        ("experiment", "# @package _global_\ncheckpoint: {evry: 3}\n", "'checkpoint.evry'"),
    ],
)
def test_an_unknown_key_in_a_plugins_file_is_told_with_the_file(project: Path, group: str, text: str, key: str) -> None:
    file = project / "plugins" / "mine" / "conf" / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^unknown key {key}; did you mean .* The key is set in {file}.$"):
        build_settings(*composed(f"+{group}=mine", "recipe=digits"))
    with pytest.raises(ConfigError) as typed:
        build_settings(*composed("+strategy.bucket_me=3", "recipe=digits"))
    assert "is set in" not in str(typed.value)


def test_files_of_an_additional_folder_are_checked_as_all_others(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials, words = tmp_path / "more" / "trial", ("--config-dir", str(tmp_path / "more"))
    trials.mkdir(parents=True)
    (trials / "late.yaml").write_text("seed: 11\n# @package _global_\n")
    (trials / "placed.yaml").write_text("# @package _global_\nhydra: {run: {dir: elsewhere}}\n")
    (trials / "swept.yaml").write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n"
    )
    with pytest.raises(ConfigError, match="^unknown key 'trial'"):  # it would be without a header
        composed(*words, "trial=late")
    assert "late.yaml, line 2: '# @package _global_' has no effect" in caplog.text
    with pytest.raises(ConfigError, match=r"placed.yaml: hydra.run.dir is not supported"):
        composed(*words, "trial=placed")
    assert [cfg.seed for cfg in composed(*words, "trial=swept")] == [1, 2]
    assert wants_sweep([*words, "trial=swept"])
    (tmp_path / "more" / "recipe").mkdir()
    (tmp_path / "more" / "recipe" / "digits.yaml").write_text("# @package _global_\nsteps: 1\n")
    with pytest.raises(ConfigError, match=r"recipe=digits is defined twice: .*more/recipe/digits.yaml. Rename or"):
        composed(*words)
    assert [cfg.steps for cfg in composed()] != [1]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("~lr", r"^~lr: the key lr is mandatory\. Set lr=null, or remove the override\.$"),
        ("~steps", r"^~steps: the key steps is mandatory\."),
        (
            "~checkpoint.every",
            r"^~checkpoint.every: the key checkpoint.every is mandatory\. Set checkpoint.every=VALUE, or remove the",
        ),
        (
            "recipe.init_form=x",
            r"\+recipe.init_form=VALUE\. The top-level key is 'init_from': set init_from=VALUE\.$",
        ),
    ],
)
def test_what_cannot_be_taken_away_or_stands_elsewhere_is_said(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(word)


def test_what_a_recipe_adds_can_be_taken_away() -> None:
    assert "dropout" in composed()[0].recipe
    assert "dropout" not in composed("~recipe.dropout")[0].recipe


def test_the_page_about_hydra_names_the_flags_that_are_followed_and_no_others() -> None:
    command = [sys.executable, "-m", "worldsize", "train", "--hydra-help"]
    page = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    flags = {word for action in get_args_parser()._actions for word in action.option_strings if word.startswith("--")}
    assert flags - {flag for flag in flags if f"\n{flag}" in page} == {*REFUSED_FLAGS}
    for flag in REFUSED_FLAGS:
        with pytest.raises(ConfigError, match=f"^{flag} is not supported"):
            composed(flag, "x")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("experiment=shirt", r"^unknown experiment 'shirt'; did you mean 'short'\? Available: long, short, text\.$"),
        ("experiments=short", r"^unknown key 'experiments'"),
        ("experiment.steps=3", r"^unknown key 'experiment.steps'"),
        (
            "optimizer.amsgrad=true",
            r"Available: .* If its _target_ accepts 'amsgrad', add it with \+optimizer.amsgrad=VALUE\.$",
        ),
        ("recipe.depth=3", r"add it with \+recipe.depth=VALUE\.$"),
        ("cluster.device_type=cpu", r"did you mean 'device'\? Available: [^+]*$"),
    ],
)
def test_what_is_not_there_is_refused_with_what_would_be_right(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(word)


@pytest.mark.parametrize("key", ["weight", "source.length"])
def test_a_misspelt_source_of_a_mixture_names_its_neighbour(key: str, project: Path) -> None:
    sources = [f"+data@data.sources.{name}.source=tokens" for name in ("books", "web")]
    chosen = ["recipe=hf_causal_lm", "data=mixture", *sources]
    with pytest.raises(
        ConfigError, match=r"^unknown key 'data.sources.boks'; did you mean 'books'\? Available: books, web\.$"
    ):
        composed(*chosen, f"data.sources.boks.{key}=1")
    with pytest.raises(ConfigError, match=r"^unknown key 'data.sources.books.source.lenght'; did you mean 'length'\?"):
        composed(*chosen, "data.sources.books.source.lenght=1")
    (project / "conf" / "experiment" / "mixed.yaml").write_text(
        "# @package _global_\ndefaults: [{/data@data.sources.books.source: tokens}, {override /recipe: hf_causal_lm}, "
        "{override /data: mixture}]\n"
    )
    with pytest.raises(
        ConfigError, match=r"^unknown key 'data.sources.boks'; did you mean 'books'\? Available: books\.$"
    ):
        composed("experiment=mixed", f"data.sources.boks.{key}=1")


def test_an_argument_that_the_yaml_leaves_out_can_be_added() -> None:
    (cfg,) = composed("+optimizer.amsgrad=true")
    assert cfg.optimizer.amsgrad is True


def test_a_file_that_says_where_hydra_shall_put_a_run_is_refused(project: Path) -> None:
    file = project / "conf" / "experiment" / "placed.yaml"
    file.write_text("# @package _global_\nhydra: {run: {dir: elsewhere}}\n")
    with pytest.raises(ConfigError, match=r"placed.yaml: hydra.run.dir is not supported"):
        composed("experiment=placed")
    assert not (project / "elsewhere").exists()


@pytest.mark.parametrize("word", ["logger=null", "+checkpoint=null"])
def test_null_as_an_option_of_a_group_that_has_none_names_that(word: str) -> None:
    group = word.removeprefix("+").removesuffix("=null")
    with pytest.raises(ConfigError, match=rf"null is not an option of the group {group}\. Set {group}=none\.$"):
        composed(word, "recipe=digits")


def test_null_as_an_option_of_a_group_that_needs_one_names_the_options() -> None:
    with pytest.raises(ConfigError, match=r"null is not an option of the group cluster.* Available: .*laptop"):
        composed("cluster=null", "recipe=digits")
