"""Commands exit silently once the reader of their output has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.observe.run_folders import write_run
from worldsize.cli import keep_operators
from worldsize.launch.restarts import command_line, needs_uv
from worldsize.messages import until_output_closes


@pytest.mark.parametrize("words", [("--help",), ("status", "--help"), ("list", "strategy"), ("train", "--cfg", "all")])
def test_a_command_whose_reader_has_gone_says_nothing(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        done = subprocess.run([sys.executable, "-m", "worldsize", *words], stdout=output, stderr=subprocess.PIPE)
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # 0: argparse ignores a closed pipe


def test_the_help_of_a_run_that_only_its_first_line_is_read_of_says_nothing(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "worldsize", "train", "--help"]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline().strip() != b""
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode in (0, 141)  # 0: everything was written before it closed


def test_another_connection_that_breaks_is_an_error() -> None:
    with pytest.raises(BrokenPipeError, match="a server"), until_output_closes():
        raise BrokenPipeError("a server")


def test_output_that_python_does_not_buffer_stays_so_when_it_may_be_lost() -> None:
    program = """if True:
        import os, sys
        from worldsize.messages import outlive_output
        outlive_output()
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            print("a", end="", file=stream)
            os.write(descriptor, b"b")
    """
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True)
    assert (done.stdout, done.stderr) == (b"ab", b"ab")


def test_a_command_that_exits_leaves_processes_of_others_their_time() -> None:
    program = """if True:
        import multiprocessing, time
        from worldsize.cli import exit_process
        def work():
            time.sleep(0.5)
            print("done", flush=True)
        multiprocessing.get_context("fork").Process(target=work).start()
        exit_process(3)
    """
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "done\n")


@pytest.mark.parametrize(
    ("environ", "files", "prefix", "wanted"),
    [
        ({"UV": "/bin/uv", "VIRTUAL_ENV": "{0}/.venv"}, ("uv.lock", "pyproject.toml"), ".venv", True),
        ({}, ("uv.lock", "pyproject.toml"), ".venv", True),  # .venv/bin/python train.py
        ({"VIRTUAL_ENV": "{0}/.venv"}, ("uv.lock", "pyproject.toml"), ".venv", False),  # it is activated
        ({}, ("uv.lock", "pyproject.toml"), "../elsewhere", False),  # installed with pip
        ({"UV": "/bin/uv"}, ("pyproject.toml",), ".venv", False),  # uv tool run
        ({"UV": "/bin/uv"}, (), ".venv", False),
    ],
)
def test_a_hint_begins_with_uv_run_where_nothing_else_finds_the_command(
    tmp_path: Path, environ: dict[str, str], files: tuple[str, ...], prefix: str, wanted: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    (below := tmp_path / "notebooks").mkdir()
    told = {name: value.format(tmp_path) for name, value in environ.items()}
    assert needs_uv(told, below, (tmp_path / prefix).resolve()) is wanted


def test_a_hint_has_the_path_of_a_command_that_is_not_on_the_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    program, *words = command_line("resume", "run").split()
    assert Path(program) == Path(sys.executable).with_name("worldsize")
    assert words == ["resume", "run"]


def test_an_exit_leaves_operators_registered_and_removes_temporary_folders(tmp_path: Path) -> None:
    import torch  # imported here, because it takes seconds

    import worldsize.cli.list  # noqa: F401 - the command, whose name in its package is that of a built-in

    library = torch.library.Library("worldsize_test", "FRAGMENT")  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        registry: list[Any] = list(getattr(weakref.finalize, "_registry"))  # noqa: B009 - private
        of_library = [each for each in registry if each.peek()[0] is library]
        others = [each for each in registry if each.peek()[2:3] and folder in str(each.peek()[2])]
        weakref.finalize(library, dict.pop, {}, "name", None)  # a function without a module
        keep_operators()
        assert [each.atexit for each in of_library] == [False]
        assert [each.atexit for each in others] == [True]


def test_a_command_escapes_what_the_encoding_of_the_terminal_lacks(tmp_path: Path) -> None:
    write_run(tmp_path / "größe", steps=1)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "worldsize", "status", str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(r"gr\xf6\xdfe")


def test_watch_and_evaluate_go_on_when_a_disk_under_their_output_is_full(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=1)
    for words, code in ((("watch", "a"), 0), (("evaluate", "a"), 2)):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "worldsize", *words],
                cwd=tmp_path,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


def test_a_full_disk_is_outlived_and_a_reader_that_has_gone_is_not() -> None:
    program = """if True:
        import sys
        from worldsize.messages import outlive_output, until_output_closes
        with until_output_closes():
            outlive_output(needs_reader=True)
            print("a", flush=True)
            print("went on", file=sys.stderr)
    """
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed, Path("/dev/full").open("wb") as full:
        ends = [
            subprocess.run([sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True)
            for output in (closed, full)
        ]
    assert [(end.returncode, end.stderr.splitlines()[1:]) for end in ends] == [(141, []), (0, ["went on"])]
    assert ends[0].stderr == ""
