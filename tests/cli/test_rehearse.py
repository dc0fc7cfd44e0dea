"""``worldsize rehearse`` shows each rank's memory and traffic, and refuses runs that it cannot rehearse."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worldsize.cli.rehearse import _show_outcome
from worldsize.core import Cluster
from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.memory import Peak
from worldsize.plan.rehearsal.operators import Group
from worldsize.plan.rehearsal.rank import Rehearsed

pytestmark = pytest.mark.heavy

LARGE = (  # half a billion parameters, 2.2 GB in float32
    "recipe=hf_causal_lm",
    "recipe.config.hidden_size=2048",
    "recipe.config.intermediate_size=8192",
    "recipe.config.num_hidden_layers=8",
    "recipe.config.num_attention_heads=16",
    "recipe.config.num_key_value_heads=16",
    "strategy=fsdp",
    "cluster.nodes=128",
    "cluster.processes=1024",
    "batch_size=1024",
)
PARAMETERS = 8 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048) + 2048 + 2 * 256 * 2048


@pytest.fixture
def rehearse(command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]) -> Any:
    def run(*words: str) -> Any:
        return command("rehearse", "logger=none", *words, cwd=tmp_path, environment=environment_without_wandb)

    return run


def test_every_rank_has_its_row_and_its_calls_and_nothing_is_launched(rehearse: Any, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    done = rehearse("recipe=digits", "strategy=fsdp", "cluster.processes=4", "--calls", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "All 4 ranks make the same calls in the same order, without a deadlock." in done.stdout
    assert "reduce_scatter(float32[" in done.stdout
    ranks = json.loads(file.read_text())
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
    assert {each["error"] for each in ranks} == {None}
    assert not (tmp_path / "runs").exists()


def test_a_large_model_is_rehearsed_on_fakes(rehearse: Any, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    done = rehearse(*LARGE, "--fake", "--ranks", "0,1023", "--json", str(file))
    assert done.returncode == 0, done.stderr
    for each in json.loads(file.read_text()):
        parts = each["peak"]["parts"]
        assert parts["parameters"] == pytest.approx(4 * PARAMETERS / 1024, rel=0.02)  # uneven shards are padded
        gathered = sum(
            call["nbytes"]
            for call in each["calls"]
            if (call["operation"], call["step"], call["phase"]) == ("all_gather", 2, "step")
        )
        assert gathered >= 2 * parts["parameters"] * 0.9  # for the forward and the backward pass


def test_a_mesh_of_slices_and_chunks_is_rehearsed_on_fakes(rehearse: Any, tmp_path: Path) -> None:
    """With divided tokens, a rank keeps fewer activations."""
    peaks = []
    mesh = ("recipe=stdlib_lm", "strategy=mesh", "strategy.tensor=2", "strategy.context=2", "cluster.processes=4")
    for divides in ("false", "true"):
        words = (*mesh, "reproducibility=elastic", "logical_tensor=2", "logical_context=2", "recipe.dropout=0.1")
        file = tmp_path / "ranks.json"
        own = (f"strategy.sequence_parallel={divides}", "--fake", "--without-evaluation", "--json", str(file))
        done = rehearse(*words, *own)
        assert done.returncode == 0, done.stdout + done.stderr
        peaks.append(json.loads(file.read_text())[0]["peak"]["parts"]["activations"])
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("strategy=parameter_server", "cluster.processes=3"),
            "has server processes, which cannot run without their peers",
        ),
        (("strategy=ddp", "cluster.processes=2", "--ranks", "0,2"), "rank 2 does not exist. The 2 ranks are 0 to 1."),
        (("strategy=ddp", "cluster.processes=2", "--ranks", "first"), "'first' is not a rank."),
        (("strategy=ddp", "cluster.processes=4", "--ranks", "3-1"), "'3-1' is an empty range. Write the smaller"),
        (("strategy=ddp", "cluster.processes=2", "--steps", "2.5"), "'2.5' is not an integer."),
        (("strategy=ddp", "cluster.processes=4", "--ranks", "0-1", "--calls", "2"), "rank 2 is not rehearsed"),
        (("strategy=ddp", "cluster.processes=2", "--json", "/absent/ranks.json"), "is not writable"),
        (("strategy=ddp", "cluster.processes=2", "--json", "/tmp"), "is not writable"),
        (  # by all ranks alike
            ("strategy=ddp", "cluster.processes=2", "--fake"),
            "DDP built real tensors. Remove --fake",
        ),
        (
            ("recipe=stdlib_lm", "strategy=mesh", "strategy.pipeline=2", "cluster.processes=2"),
            "Set strategy.pipeline=1",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(rehearse: Any, words: tuple[str, ...], reason: str) -> None:
    done = rehearse("recipe=digits", *words) if "recipe=stdlib_lm" not in words else rehearse(*words)
    assert done.returncode == 2
    assert reason in done.stderr


def test_one_rank_alone_agrees_with_nobody(rehearse: Any) -> None:
    done = rehearse("recipe=digits", "strategy=ddp", "cluster.processes=4", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "Only rank 2 was rehearsed" in done.stdout
    assert "same calls" not in done.stdout


def ranks(*errors: str | None) -> list[Rehearsed]:
    call = Call("barrier", Group(tuple(range(len(errors))), 0), "", None, 0, "program.py:1 (step)", 1)
    return [Rehearsed(rank, [call], Peak(0, {}), None, {}, error) for rank, error in enumerate(errors)]


def shown(rehearsed: Sequence[Rehearsed]) -> int:
    options = argparse.Namespace(steps=2, calls=None)
    cluster = Cluster("test", 1, 3, "cpu", "gloo")
    return _show_outcome(rehearsed, cluster, options)


def test_what_several_ranks_fail_with_is_said_once_without_advice_on_differences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(ranks("in step 1: ValueError: x", "in step 1: ValueError: x", "in step 1: KeyError: 1")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["ranks 0-1 fail in step 1: ValueError: x", "rank 2 fails in step 1: KeyError: 1"]


def test_ranks_that_need_objects_of_one_that_was_left_out_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, *failed = ranks(*["in step 1: EOFError: Ran out of input"] * 3)
    asked = [replace(failed[0].calls[0], operation="broadcast", form="objects, root 0")]
    assert shown([replace(each, calls=asked) for each in failed]) == 1
    assert "The objects sent by rank 0 are unknown. Add 0 to --ranks." in capsys.readouterr().out


def test_ranks_that_do_not_settle_are_not_accused(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = ranks(None, None, None)
    assert shown([first, replace(second, calls=[], is_settled=False), replace(third, is_settled=False)]) == 1
    said = capsys.readouterr().out
    assert "The collectives of ranks 1-2 depend on objects" in said
    assert "no further call" not in said
