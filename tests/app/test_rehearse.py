"""``worldsize rehearse`` draws what each rank would hold and send, and refuses what it cannot rehearse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LARGE = (  # 1.7 billion parameters, 6.7 GB in float32
    "recipe=hf_causal_lm",
    "recipe.config.hidden_size=2048",
    "recipe.config.intermediate_size=8192",
    "recipe.config.num_hidden_layers=24",
    "recipe.config.num_attention_heads=16",
    "recipe.config.num_key_value_heads=16",
    "strategy=fsdp",
    "cluster.nodes=128",
    "cluster.processes=1024",
    "batch_size=1024",
)
PARAMETERS = 24 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048) + 2048 + 2 * 256 * 2048


@pytest.fixture
def rehearse(command: Any, tmp_path: Path, environment_without_wandb: dict[str, str]) -> Any:
    def run(*words: str) -> Any:
        return command("rehearse", "logger=none", *words, cwd=tmp_path, environment=environment_without_wandb)

    return run


def test_every_rank_has_its_row_and_its_calls_and_nothing_is_launched(rehearse: Any, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    done = rehearse("recipe=digits", "strategy=fsdp", "cluster.processes=4", "--calls", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "All 4 ranks make the same calls in the same order, and none waits for ever." in done.stdout
    assert "reduce_scatter(float32[" in done.stdout
    ranks = json.loads(file.read_text())
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
    assert {each["error"] for each in ranks} == {None}
    assert not (tmp_path / "runs").exists()


def test_a_model_that_no_process_could_hold_is_rehearsed_on_fakes(rehearse: Any, tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    done = rehearse(*LARGE, "--fake", "--ranks", "0,1023", "--json", str(file))
    assert done.returncode == 0, done.stderr
    for each in json.loads(file.read_text()):
        parts = each["peak"]["parts"]
        assert parts["parameters"] == pytest.approx(4 * PARAMETERS / 1024, rel=0.02)  # what does not divide is padded
        gathered = sum(
            call["nbytes"] for call in each["calls"] if call["operation"] == "all_gather" and call["step"] == 2
        )
        assert gathered >= 2 * parts["parameters"] * 0.9  # for the forward and the backward pass


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("strategy=parameter_server", "cluster.processes=3"), "has processes that serve"),
        (("strategy=ddp", "cluster.processes=2", "--ranks", "0,2"), "there is no rank 2 among 2. They are 0 to 1."),
        (("strategy=ddp", "cluster.processes=2", "--ranks", "first"), "'first' is no rank."),
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


def test_fakes_are_refused_where_a_process_holds_the_whole_model(rehearse: Any) -> None:
    done = rehearse("recipe=digits", "strategy=ddp", "cluster.processes=2", "--fake", "--ranks", "0")
    assert done.returncode == 1
    assert "DDP has made the model with real tensors. Leave --fake out" in done.stdout
