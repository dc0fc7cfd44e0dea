"""CUDA can be used in every forked process, or the process restarts by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_recipe import write_recipe
from tests.world.forks import BUILDS, COMMANDS, OTHERS
from worldsize import cli

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).parents[2]

ASKS = """
import torch
from recipes.digits.recipe import Digits

try:
    torch.cuda.init()
except RuntimeError:  # the gate has no driver
    pass

class Asks(Digits):
    pass
"""

# torch queries the driver to count MIG devices, in a child; then CUDA is started before a fork, and that child
# replaces itself by a program that the parent reads from and ends
REPLACED = """
import multiprocessing.connection, os, sys
from contextlib import suppress
from multiprocessing import get_context
import torch
from worldsize.messages import show_messages
from worldsize.world.processes import leave_bad_fork, will_fork

show_messages()
asked = torch._C._cuda_getDeviceCount
torch._C._cuda_getDeviceCount = lambda: (asked(), 3)[1]
will_fork()
os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1"
assert torch.cuda.device_count() == 3
if (child := os.fork()) == 0:
    os._exit(torch.cuda._is_in_bad_fork())
assert os.waitpid(child, 0)[1] == 0, "a count spoils forks"
with suppress(RuntimeError):  # there is no driver
    torch.cuda.init()
begun, ended = os.pipe(), os.pipe()
program = "import os, sys; os.write(int(sys.argv[1]), b'%d' % os.getpid()); os.read(int(sys.argv[2]), 1); sys.exit(7)"
body = [sys.executable, "-c", program, str(begun[1]), str(ended[0])]
process = get_context("fork").Process(target=leave_bad_fork, args=(body,))
process.start()
assert os.read(begun[0], 20) == b"%d" % process.pid, "the new program has another number"
assert not multiprocessing.connection.wait([process.sentinel], 0), "it counts as ended"
os.write(ended[1], b"!")
process.join()
assert process.exitcode == 7
"""


# torchao's kernels query the device's capability on import: workers restart by themselves
ALLOWED = "torchao/prototype/mx_formats/kernels.py"


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_process_that_cuda_refuses_replaces_itself_and_is_waited_for(tmp_path: Path) -> None:
    done = run(REPLACED, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CUDA was used by <string>, line 19 before this process was forked. Restarting" in done.stderr


# a finished run again, with a plan for cuda where its configuration has cpu: the gate runs without a GPU
AGAIN = """
import sys
from dataclasses import replace
from pathlib import Path
from worldsize.config.recorded import read_settings
from worldsize.launch.local import Local
from worldsize.messages import show_messages
from worldsize.record.run_directory import RunDirectory
from worldsize.world.processes import will_fork

show_messages()
will_fork()
run = RunDirectory(Path(sys.argv[1]))
plan = read_settings(run).create_plan(run.path)
print(Local().launch(replace(plan, cluster=replace(plan.cluster, device="cuda"))).wait().exit_reason)
"""


@pytest.mark.parametrize("options", [(), ("strategy.on_failure=heal", "checkpoint=none")], ids=["gang", "heals"])
def test_workers_of_a_recipe_that_asks_cuda_at_its_import_train(
    options: tuple[str, ...], tmp_path: Path, train: Any
) -> None:
    text = (REPOSITORY / "recipes" / "digits" / "conf" / "recipe" / "digits.yaml").read_text()
    recipe = write_recipe(tmp_path, "asks", ASKS, asks=text.replace("digits.recipe.Digits", "asks.recipe.Asks"))
    run_folder: Path = train("recipe=asks", "steps=1", "cluster.processes=2", *options).folder
    done = run(AGAIN, str(run_folder), folder=tmp_path)
    assert done.stdout.endswith("completed\n"), done.stderr
    for rank in range(2):
        log = (run_folder / "logs" / f"worker_{rank:05d}.log").read_text()
        assert f"by {recipe / 'recipe.py'}, line 6 before this process was forked. Restarting" in log


@pytest.mark.timeout(900)
def test_no_recipe_optimizer_or_command_asks_cuda_before_it_forks(tmp_path: Path) -> None:
    assert {words[0] for words in COMMANDS} | OTHERS.keys() == cli.COMMANDS.keys()
    recipes = {path.stem for path in REPOSITORY.glob("*/*/conf/recipe/*.yaml")}
    assert {word.partition("=")[2] for row in BUILDS for words in row for word in words if "recipe=" in word} == recipes
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.world.forks"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("bad fork") and ALLOWED not in line] == []
    assert [line for line in lines if line.startswith("built")] == [
        f"built: {' '.join(words)}" for row in BUILDS for words in row
    ], done.stderr
    # the plan measures on a GPU, but there is none
    expected = [f"ended: {int(words[0] == 'plan')}: {' '.join(words)}" for words in COMMANDS]
    assert [line for line in lines if line.startswith("ended") and "build" not in line] == expected, done.stderr
