"""A custom launcher needs one Python file, one YAML file, and no change elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusters.test_own_project import files_of

pytestmark = pytest.mark.heavy

DIGITS = ("recipe=digits", "steps=10", "reproducibility=elastic", "cluster.threads=1")


def test_a_launcher_of_ones_own_is_one_file_and_one_yaml(
    train: Any, command: Any, tmp_path: Path, warm_python: Path, environment_without_wandb: dict[str, str]
) -> None:
    made = command("new", "launcher", "programs", cwd=tmp_path, environment=environment_without_wandb)
    assert made.returncode == 0, made.stderr
    run = train(*DIGITS, "+cluster=programs", "launcher.niceness=5", python=warm_python)
    assert run.code == 0, run.error
    alone = train(*DIGITS, "cluster.processes=2").json("result.json")
    assert run.json("result.json")["state_digest"] == alone["state_digest"]
    assert run.json("run_manifest.json")["attempts"][0]["exit_reason"] == "completed"
    assert "2 × nice -n 0" in train(*DIGITS, "+cluster=programs", "launch=show").output
    refused = train(*DIGITS, "+cluster=programs", "cluster.nodes=2", "cluster.processes=2")
    assert (refused.code, "cluster=programs has one node; cluster.nodes=2" in refused.error) == (2, True)


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    """Write the launcher of docs/plugins.md into a project folder; return the path of its YAML."""
    shown = files_of("plugins/mine/")
    assert {Path(name).suffix for name in shown} == {".py", ".yaml"}
    for name, text in shown.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "plugins" / "mine" / "conf" / "cluster" / "mine.yaml"


def test_the_launcher_that_the_documentation_shows_trains(documented: Path, train: Any, warm_python: Path) -> None:
    run = train(*DIGITS, "+cluster=mine", "cluster.cores=[0]", "launcher.niceness=5", python=warm_python)
    assert run.code == 0, run.error
    assert run.json("result.json")["state_digest"] == train(*DIGITS).json("result.json")["state_digest"]
    assert "niceness: 5" in (run.folder / "config.yaml").read_text()
    assert "2 × taskset --cpu-list 0 nice -n 10" in train("+cluster=mine", "cluster.cores=[0]", "launch=show").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launcher.nicenes=5",), "unknown key 'launcher.nicenes'; did you mean 'niceness'?"),
        (("+launcher.nicenes=5",), "unknown key 'launcher.nicenes'; did you mean 'niceness'?"),
        (("cluster.core=[0]",), "unknown key 'cluster.core'; did you mean 'cores'?"),
        (("launcher.niceness=low",), "launcher.niceness='low' has the wrong type: expected an integer."),
        (("cluster.cores=[first]",), "cluster.cores[0]='first' has the wrong type: expected an integer."),
        (("launcher=local",), "launcher=local: the cluster determines the launcher. Set cluster=NAME."),
    ],
)
def test_an_option_that_is_misspelt_or_of_the_wrong_type_is_refused_before_a_process_starts(
    documented: Path, train: Any, words: tuple[str, ...], said: str
) -> None:
    refused = train(*DIGITS, "+cluster=mine", *words)
    assert (refused.code, refused.folder) == (2, None)
    assert said in refused.error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nicenes: 5", "unknown key 'launcher.nicenes'; did you mean 'niceness'?"),
        ("niceness: low", "launcher.niceness: Value 'low' of type 'str' could not be converted to Integer."),
    ],
)
def test_what_is_wrong_in_the_yaml_is_refused_with_its_place(
    documented: Path, train: Any, line: str, said: str
) -> None:
    documented.write_text(f"{documented.read_text()}  {line}\n")
    refused = train(*DIGITS, "+cluster=mine")
    assert (refused.code, refused.folder) == (2, None)
    assert f"{documented}: {said}" in refused.error
