"""Command-line values are parsed by the type of their key: text stays text, without quotes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from worldsize.config.compose import compose_and_call
from worldsize.core import ConfigError
from worldsize.core.limits import FolderName
from worldsize.data.source import check_paths
from worldsize.data.sources.json_lines import JsonLines
from worldsize.launch.slurm import _quote_value


def value(key: str, *words: str) -> list[Any]:
    """Return the value of ``key`` in each configuration composed from the words."""
    found: list[Any] = []
    compose_and_call(lambda cfg: found.append(OmegaConf.select(cfg, key)), ["recipe=digits", *words])
    return [OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for each in found]


TEXTS = ("1e3", "12e4567", "1_000", "true", "None", "nan", "inf", "0012", ".5", "größe", "日本", "~x", "a;b", "a=b&c")


@pytest.mark.parametrize("text", TEXTS)
def test_a_name_stays_as_it_is_typed(text: str) -> None:
    assert value("run.name", f"run.name={text}") == [text]


def test_names_in_lists_sweeps_and_options_of_a_cluster_stay_as_they_are_typed(tmp_path: Path) -> None:
    assert value("run.include", "run.include=[1e3, é, *.pem]") == [["1e3", "é", "*.pem"]]
    folder = f"hydra.sweep.dir={tmp_path}"
    assert value("run.name", "--multirun", folder, "run.name=1e3,2e3,é") == ["1e3", "2e3", "é"]
    assert value("cluster.partition", "cluster=slurm", "cluster.partition=1e3") == ["1e3"]
    words = ["cluster=slurm", "+cluster.options.comment=1e3", "+cluster.options.contiguous=null"]
    assert value("cluster.options", *words) == [{"comment": "1e3", "contiguous": None}]
    assert value("logger.project", "logger=wandb", "logger.project=1e3") == ["1e3"]
    assert value("logger.entity", "logger=wandb", "logger.entity=1_000") == ["1_000"]
    assert value("run.name", "run.name=null") == [None]
    assert value("recipe.own", "+recipe.own={a: é, b: 1}") == [{"a": "é", "b": 1}]
    assert value("run.root", "seed=7", "run.root=/data/${seed}/é") == ["/data/7/é"]


@pytest.mark.parametrize("key", ["steps", "checkpoint.every", "data_workers", "cluster.threads"])
def test_a_whole_number_may_have_an_exponent(key: str) -> None:
    assert value(key, f"{key}=1e1") == [10]
    with pytest.raises(ConfigError, match=rf"^{key}='1.5' has the wrong type: expected an integer"):
        value(key, f"{key}=1.5")
    with pytest.raises(ConfigError, match=rf"^{key}='1e\+300' has the wrong type: expected an integer"):
        value(key, f"{key}=1e300")


@pytest.mark.parametrize("key", ["run.root", "init_from", "cluster.topology"])
def test_a_path_may_begin_with_the_home_folder(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert value(key, f"{key}=~/a b") == ["/home/me/a b"]
    assert value(key, f"{key}='~/é'") == ["/home/me/é"]
    assert value(key, f"{key}=~nobody-of-this-name/a") == ["~nobody-of-this-name/a"]


def test_data_may_lie_in_the_home_folder_of_the_host_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = value("data.path", "recipe=click_through", "data=jsonl", "data.path=~/a b.jsonl")
    (tmp_path / "a b.jsonl").write_text('{"text": "é"}\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(JsonLines(path)) == 1
    with pytest.raises(ConfigError, match="~nobody-of-this-name/a"):
        check_paths(SimpleNamespace(source=JsonLines("~nobody-of-this-name/a")))


@pytest.mark.parametrize("name", ["a\n#SBATCH --exclusive", "a\x1b[31m", "a\u2028b"])
def test_a_name_of_several_lines_is_refused(name: str) -> None:
    assert "is not a valid folder name" in str(FolderName().describe_violation(name))


def test_an_option_of_several_lines_is_no_line_of_a_job_script() -> None:
    assert _quote_value("a b") == '"a b"'
    with pytest.raises(ConfigError, match="an sbatch option must be a single line"):
        _quote_value("a\n#SBATCH --exclusive")


@pytest.mark.parametrize("text", ["'${'", "'${a b}'", "${oc.env:}", "${oc.nothing:x}"])
def test_a_reference_that_means_nothing_is_to_be_left_out(text: str) -> None:
    """Configured objects do not accept such text, also after a backslash."""
    with pytest.raises(ConfigError, match=r"^optimizer\.fused: [^\\]* or remove \$\{\.$"):
        value("optimizer.fused", f"optimizer.fused={text}")


def test_what_cannot_be_read_is_to_be_quoted() -> None:
    with pytest.raises(ConfigError, match=r"^failed to parse .* To pass a string, quote it: run.name='\"VALUE\"'\.$"):
        value("run.name", "run.name=a'b;c")
