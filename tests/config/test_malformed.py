"""Any malformed command line is refused: exit code 2, one sentence, and neither a process nor a folder."""

from __future__ import annotations

import atexit
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.config.golden import REPOSITORY
from tests.observe.run_folders import attempt, write_run
from tests.support.loggers import keep_loggers
from worldsize import cli
from worldsize.config.instantiate import Allowed, resolve_target
from worldsize.config.schema import Schema
from worldsize.core import ConfigError, FolderName, Limit, OneOf, Range
from worldsize.core.launcher import OF_CLUSTER
from worldsize.core.limits import check_limits
from worldsize.devices import device_count

Option = tuple[tuple[str, ...], str, Any]  # further words, the key, and its annotation
RUN, PLACE = "RUN", "PLACE"  # stand for a run's folder and for a path without a run


# ---------------------------------------------------------------- the options


def of_schema(section: type, path: str = "") -> Iterator[Option]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        if is_dataclass(hint) and isinstance(hint, type):
            if name != "numerics":  # its keys interpolate other keys
                yield from of_schema(hint, f"{path}{name}.")
        elif hint is not Any and not name.startswith("_"):
            yield (), path + name, hint


def of_group(group: str, key: str, folder: Path) -> Iterator[Option]:
    """Yield the options of every dataclass used by a YAML of the group."""
    for file in sorted(folder.glob(f"conf/{group}/*.yaml")):
        whole: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        node = whole if "_target_" in whole else whole.get(key) or {}
        if "_target_" not in node:
            continue
        target = resolve_target(str(node["_target_"]), Allowed(), key)
        hints = get_type_hints(target, include_extras=True)
        options = (
            [(each.name, bool(each.metadata.get(OF_CLUSTER))) for each in fields(target)]
            if is_dataclass(target)
            else [(name, False) for name in hints if name in node]
        )
        for name, of_cluster in options:
            if group == "cluster" or name in node:
                chosen = () if group in ("schedule", "reproducibility") else (f"{group}={file.stem}",)
                yield chosen, f"{'cluster' if of_cluster else key}.{name}", hints[name]


def options() -> Iterator[Option]:
    yield from of_schema(Schema)
    yield from of_group("cluster", "launcher", REPOSITORY)
    yield from of_group("strategy", "strategy", REPOSITORY)
    for plugin in ("diloco", "streaming_diloco", "easgd", "local_sgd"):
        yield from of_group("strategy", "strategy", REPOSITORY / "plugins" / plugin)
    for recipe in ("digits", "click_through", "word2vec"):
        yield from of_group("recipe", "recipe", REPOSITORY / "recipes" / recipe)
    yield (), "schedule.warmup", Annotated[float, Range(least=0, most=1)]
    yield (), "schedule.floor", Annotated[float, Range(least=0)]
    yield (), "checkpoint.keep.last", Annotated[int, Range(least=1)]
    yield (), "checkpoint.keep.every", Annotated[int, Range(least=0)]
    yield (), "reproducibility.threads", Annotated[int | None, Range(least=1)]
    yield (), "logger.mode", Literal["auto", "online", "offline", "disabled"]


# ---------------------------------------------------------------- the faults of each


WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=9).map(lambda word: f"zz{word}")
NUMBERS = st.one_of(
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -1, 0, -0.5, 1.5, 10**30, -(10**30)]),
    st.integers(-(10**6), 10**6),
    st.floats(),
)


def malformed(hint: Any) -> st.SearchStrategy[str] | None:
    """Return words that do not parse as the annotation; None if everything does."""
    kinds, limits = parts(hint)
    choices: list[st.SearchStrategy[str]] = []
    if {int, float} & kinds and not {str, Any} & kinds:
        whole = float not in kinds
        numbers = NUMBERS.filter(lambda value: is_outside(hint, value, whole=whole)).map(repr)
        choices += [WORDS, st.just("[1,2]"), *([numbers] if limits or whole or float in kinds else [])]
    elif bool in kinds and len(kinds) == 1:
        choices += [WORDS, st.just("[true]")]
    elif any(isinstance(limit, OneOf) for limit in limits) or Literal in kinds:
        choices += [WORDS]
    elif any(isinstance(limit, FolderName) for limit in limits):
        choices += [st.sampled_from(["..", ".", "a/b", "/a", "-a", "''", "../a"])]
    elif kinds and kinds <= {list, dict}:
        choices += [WORDS]
    return st.one_of(choices) if choices else None


def parts(hint: Any) -> tuple[set[Any], list[Limit]]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kinds, limits = parts(arguments[0])
        return kinds, [*limits, *(each for each in hint.__metadata__ if isinstance(each, Limit))]
    if origin is Union or "UnionType" in type(hint).__name__:
        found = [parts(option) for option in arguments if option is not type(None)]
        return {kind for kinds, _ in found for kind in kinds}, [limit for _, limits in found for limit in limits]
    if origin is Literal:
        return {Literal}, []
    if isinstance(origin, type):
        return {dict if "Mapping" in origin.__name__ or origin is dict else list}, []
    return {hint}, []


def is_outside(hint: Any, value: float, *, whole: bool) -> bool:
    if (whole and value != value) or (whole and isinstance(value, float)):
        return True  # a fraction, or not a number
    holder = type("Holder", (), {"__annotations__": {"key": hint}})
    try:
        check_limits(holder, {"key": value}, key="")
    except ConfigError:
        return True
    return value != value


OPTIONS = [option for option in options() if malformed(option[2]) is not None]
GARBAGE = st.text("abz=[]{}:,'\"$.~+-*? \\\n", max_size=12).map(lambda text: f"zz{text}")
COMPOSED = (["train"], ["train", "launch=show"], ["plan"], ["doctor"], ["resume", RUN])


@st.composite
def composed(draw: st.DrawFn) -> list[str]:
    """Draw a command that composes a configuration, with one fault in it."""
    command = draw(st.sampled_from(COMPOSED))
    if draw(st.integers(0, 9)) == 0:
        return [*command, draw(GARBAGE)]
    chosen, key, hint = draw(st.sampled_from(OPTIONS))
    wrong = malformed(hint)
    assert wrong is not None
    logger = "wandb" if key.startswith("logger.") else "none"
    return [*command, f"logger={logger}", *chosen, f"{key}={draw(wrong)}"]


BAD_WHOLE = st.sampled_from(["-1", "1.5", "many", "nan", ""])
BAD_NUMBER = st.sampled_from(["-1", "nan", "inf", "many", "-inf", ""])
PATHS = st.just(PLACE)
OTHERS: Sequence[Sequence[str | st.SearchStrategy[str]]] = (
    [WORDS],
    [st.sampled_from([name for name in cli.COMMANDS if name != "train"]), WORDS.map(lambda word: f"--{word}")],
    ["status", "nowhere"],
    ["status", st.sampled_from(["empty", "file"])],
    [st.sampled_from(["watch", "logs", "cancel", "report", "resume", "reproduce", "agent"]), PATHS],
    ["cancel", RUN],
    ["logs", RUN, "--rank", BAD_WHOLE],
    ["compare", PATHS, RUN],
    ["compare", RUN, PATHS],
    ["compare", RUN],
    ["compare", RUN, RUN, "--tolerance", BAD_NUMBER],
    ["resume", RUN, "--ignore"],
    ["workers", st.sampled_from(["list", "add", "remove"]), "--run", st.sampled_from([RUN, PLACE])],
    ["workers", "add", BAD_WHOLE, "--run", RUN],
    ["workers", WORDS, "--run", RUN],
    ["plan", "--compute", "250ms", "--model-size", BAD_NUMBER],
    ["plan", "--compute", st.sampled_from(["1", "-1s", "nans", "ms", "many"])],
    ["plan", "--overlap", st.sampled_from(["-1", "2", "nan", "many"])],
    ["plan", "--links", PATHS],
    ["plan", "--strategies", WORDS],
    ["plan", "--model-size", "1e9"],
    ["doctor", "--patience", BAD_NUMBER],
    ["doctor", "--json", "/nowhere/at/all"],
    ["scale", "--links", PATHS],
    ["scale", "--mode", WORDS],
    ["scale", st.sampled_from(["world_sizes=0", "world_sizes=x", "world_sizes=", "accumulations=-1"])],
    ["scale", "lr=nan"],
    ["list", WORDS],
    ["new", WORDS, "mine"],
    ["new", "strategy", st.sampled_from(["Bad", "no-dash", "class", "", "a.b", "ddp"])],
    ["init", st.sampled_from(["a b", "-", "ä", "_x"])],
    ["reproduce", RUN, "--tolerance", BAD_NUMBER],
)


@st.composite
def other(draw: st.DrawFn) -> list[str]:
    """Draw a command that does not compose, or fails before it does."""
    words = draw(st.sampled_from(OTHERS))
    return [word if isinstance(word, str) else draw(word) for word in words]


# ---------------------------------------------------------------- calling a command


class Place:
    """A working directory with a run's folder and with paths that are not runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ended = attempt(1, steps=[0, 20])
        config = {"run": {"import_path": [str(folder)]}}
        self.run = write_run(
            folder / "kept" / "digits" / "one", steps=20, attempts=[ended], overrides=["recipe=digits"], config=config
        )
        (folder / "empty").mkdir()
        (folder / "file").write_text("no run")
        for name, manifest in (("cut", "{"), ("foreign", "{}"), ("list", "[]"), ("binary", "\0\x01")):
            (folder / name).mkdir()
            (folder / name / "run_manifest.json").write_text(manifest)
        self.places = ("nowhere", "empty", "file", "cut", "foreign", "list", "binary")

    def files(self) -> dict[str, bytes]:
        """Read every file except locks: a resuming command takes them before it reads anything."""
        return {
            str(path): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.name != ".lock"
        }


def stop(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a process was about to start")


@contextmanager
def nothing_starts(folder: Path) -> Iterator[None]:
    """Work in ``folder``: an exit is a SystemExit, a new process an error; everything is restored afterwards."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    device_count("cuda")  # after earlier tests have forked runs, this queries the driver in a child, once
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        keep_loggers(patch)
        patch.setattr(sys, "path", [*sys.path])
        for name in ("HYDRA_FULL_ERROR", "WORLDSIZE_PLUGINS"):
            patch.setenv(name, os.environ.get(name, ""))
        patch.delenv("WORLDSIZE_PLUGINS")
        patch.setattr(atexit, "_run_exitfuncs", lambda: None)
        patch.setattr(os, "_exit", leave)
        patch.setattr(os, "fork", stop)
        patch.setattr(subprocess, "Popen", stop)
        yield


def called(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Call ``worldsize WORDS`` in this process; return exit code, standard output and standard error."""
    output, error = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["worldsize", *words]
    code: Any = 0
    try:
        with nothing_starts(folder), redirect_stdout(output), redirect_stderr(error):
            cli.main()
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.argv = before
    return code, output.getvalue(), error.getvalue()


def check_refused(words: Sequence[str], place: Place) -> None:
    before = place.files()
    code, _, error = called(words, place.folder)
    assert code == 2, (code, words, error)
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.strip()]
    sentence = lines[-1]
    assert lines == [sentence] or lines[0].startswith("usage:"), (words, error)
    assert len(sentence) > 10, (words, error)
    assert place.files() == before, words
    assert not (place.folder / "runs").exists()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


LIGHT = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a command with one fault is already minimal
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


@LIGHT
@given(words=composed())
def test_a_malformed_configuration_is_refused(place: Place, words: list[str]) -> None:
    check_refused([str(place.run) if word == RUN else word for word in words], place)


@LIGHT
@given(words=other(), name=st.integers(0, 6))
def test_a_malformed_command_is_refused(place: Place, words: list[str], name: int) -> None:
    there = {RUN: str(place.run), PLACE: str(place.folder / place.places[name])}
    check_refused([there.get(word, word) for word in words], place)


@pytest.mark.parametrize(
    "word", ["run.examine=all", "cluster.timeout=-1", "launcher.save_grace=-1", "launcher.max_restarts=-1"]
)
def test_doctor_refuses_a_value_in_whose_place_it_has_one_of_its_own(place: Place, word: str) -> None:
    check_refused(["doctor", "logger=none", word], place)


DIGITS = ("train", "recipe=digits", "logger=none", "strategy=single", "cluster.processes=1", "cluster.threads=1")
SLURM = ("train", "recipe=digits", "logger=none", "+cluster=slurm", "cluster.gpus_per_node=1", "launch=show")
LATE = {
    "data without lengths": (*DIGITS, "length_balanced=true"),
    "an unknown point of a fault": (*DIGITS, "faults=[{action: kill, point: nowhere}]"),
    "a misspelt point of a fault": (*DIGITS, "faults=[{action: kill, point: 'step:forwards'}]"),
    "a word as time limit": (*SLURM, "cluster.time=never"),
    "a negative time limit": (*SLURM, "cluster.time=-1"),
    "an empty root": (*DIGITS, "run.root="),
    "a root that is too long": (*DIGITS, f"run.root=/tmp/{'/'.join(['d' * 200] * 30)}"),
    "a root that cannot be made": (*DIGITS, "run.root=/proc/x"),
    "a sweep below a root that cannot be made": (*DIGITS, "--multirun", "seed=1,2", "run.root=/proc/x"),
    "a sweep in a folder that cannot be made": (*DIGITS, "--multirun", "seed=1,2", "hydra.sweep.dir=/proc/x"),
    "a number of 4,400 digits": (*DIGITS, f"seed={'1' * 4400}"),
    "a batch that no machine holds": (*DIGITS, f"batch_size={10**12}"),
    "a model whose size overflows": (*DIGITS, f"recipe.width={10**12}"),
    "a model that no process addresses": (*DIGITS, f"recipe.width={10**7}"),
    "a name of 300 characters": ("init", "x" * 300),
    "a plugin's name of 300 characters": ("new", "strategy", "x" * 300),
}


@pytest.mark.parametrize("name", LATE)
def test_what_would_fail_after_the_start_is_refused(place: Place, name: str) -> None:
    check_refused(LATE[name], place)


def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["worldsize", "train", "recipe=digits"])
    with pytest.raises(SystemExit, match="^2$"):
        cli.check_working_directory()
    assert capsys.readouterr().err.startswith("the working directory is not accessible")


@pytest.mark.heavy
@pytest.mark.timeout(900)
@settings(LIGHT, max_examples=40)
@given(words=other(), name=st.integers(0, 6))
def test_many_malformed_commands_are_refused(place: Place, words: list[str], name: int) -> None:
    there = {RUN: str(place.run), PLACE: str(place.folder / place.places[name])}
    check_refused([there.get(word, word) for word in words], place)
