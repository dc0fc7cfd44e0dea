"""Each strategy trains, evaluates, saves and loads on fake CUDA tensors, without a GPU: see tests/fake_cuda/rank.py.

Fakes have neither values nor stream order: they reveal a tensor on the wrong device, or a wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import ABSENT, cases
from tests.support.runs import environment

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
_PARTS = 2  # processes, each for a part of the cases


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the libraries that simulate GPUs for torch."""
    folder = tmp_path_factory.mktemp("shims")
    for source, library in {"driver.c": "libcuda.so.1", "device_count.c": "libdevices.so"}.items():
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / library, HERE / source], check=True)
    return folder


def run(commands: list[list[str]], shims: Path) -> list[dict[str, Any]]:
    """Run the cases one after the other in one process."""
    library = shims / "libdevices.so"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.rank", library],
        input="".join(f"{json.dumps(each)}\n" for each in commands),
        env=environment(LD_LIBRARY_PATH=str(shims), LD_PRELOAD=str(library), OMP_NUM_THREADS="1"),
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(commands), done.stderr[-4000:]
    return answers


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(_PARTS))
def test_a_rank_on_cuda_waits_only_where_it_must(part: int, shims: Path) -> None:
    chosen = cases()[part::_PARTS]
    answers = run([case.words for case in chosen], shims)
    failures = {" ".join(each["words"]): each["error"] for each in answers if each["error"]}
    assert failures == {}
    on_device = {" ".join(each["words"]): each["on_device"] for each in answers if each["on_device"]}
    assert on_device == {}, "a save keeps tensors on the GPU"
    found = {
        case.line: {tuple(key): n for *key, n in each["waits"]} for case, each in zip(chosen, answers, strict=True)
    }
    expected = {case.line: case.waits() for case in chosen}
    assert [
        f"{line}: {' '.join(place)}: {found[line].get(place, 0)}, not {expected[line].get(place, 0)}"
        for line in expected
        for place in sorted(found[line].keys() | expected[line].keys())
        if found[line].get(place, 0) != expected[line].get(place, 0)
    ] == [], "waits that WAITS does not name, or waits there that are no more"


def test_every_strategy_and_every_pair_of_options_is_among_the_cases() -> None:
    folders = ("conf/strategy", "plugins/*/conf/strategy")
    known = {path.stem for folder in folders for path in REPOSITORY.glob(f"{folder}/*.yaml")}
    assert {case.strategy[0].partition("=")[2] for case in cases()} | ABSENT.keys() == known
    options = [case.options for case in cases()]
    for one, other in combinations(range(5), 2):
        there = {(case[one], case[other]) for case in options}
        assert there == {(a[one], b[other]) for a in options for b in options}
