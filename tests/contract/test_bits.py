"""Bits do not depend on addresses: killed and resumed on a disordered heap, strategies reproduce their bits.

``uv run pytest -m bits`` runs under each ATEN_CPU_CAPABILITY of the machine: a different vector width may give
other bits, but each must give its own at every world size and after every restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.parameter_server import players
from tests.support.outcome import outcome

pytestmark = pytest.mark.heavy

bits = pytest.mark.bits

DIGITS = ("recipe=digits", "recipe.width=4", "steps=10", "clip_norm=0.5")
_NETWORK = ("recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=32")
GPT = ("recipe=stdlib_lm", *_NETWORK, "recipe.test_bytes=2000", "steps=10", "batch_size=12")
_TABLES = ("recipe.dim=4", "recipe.rows=50", "recipe.bottom=[8,4]", "recipe.top=[8]")
_SAMPLES = ("data.rows=2000", "data.test_rows=200", "data.categories=500")  # each process generates them again
CLICKS = ("recipe=click_through", *_TABLES, *_SAMPLES, "steps=10", "batch_size=32")
PLAYERS = ("recipe=players", "steps=10", "logical_ranks=4")  # several updates per step
PACE = ("log_every=3", "evaluate_every=5", "checkpoint.every=4", "checkpoint.keep.last=3", "cluster.threads=1")
PERTURBED = "{action: perturb, rank: null, attempt: null}"

DETERMINISTIC = {
    "single": (*DIGITS, "strategy=single", "cluster.processes=1"),
    "ddp": (*DIGITS, "strategy=ddp", "cluster.processes=3"),
    "int8": (*DIGITS, "strategy=ddp", "strategy.compress=int8", "cluster.processes=3"),
    "powersgd": (*DIGITS, "strategy=ddp", "strategy.compress=powersgd", "cluster.processes=3"),
    "zero": (*DIGITS, "strategy=zero", "cluster.processes=3"),
    "fsdp": (*DIGITS, "strategy=fsdp", "cluster.processes=3"),
    "hsdp": (*DIGITS, "strategy=hsdp", "strategy.shard=2", "cluster.processes=4"),
    "mesh": (*GPT, "strategy=mesh", "strategy.tensor=2", "strategy.pipeline=2", "cluster.processes=4"),
    "parameter_server": (*DIGITS, "strategy=parameter_server", "strategy.servers=2", "cluster.processes=5"),
    "servers_of_updates": (*PLAYERS, "strategy=parameter_server", "strategy.servers=2", "cluster.processes=4"),
    "hybrid_parameter_server": (*CLICKS, "strategy=hybrid_parameter_server", "cluster.processes=3"),
    "local_sgd": (*DIGITS, "strategy=local_sgd", "strategy.optimizer_state=mean", "strategy.inner_steps=3"),
    "diloco": (*DIGITS, "strategy=diloco", "strategy.inner_steps=3"),
    "streaming_diloco": (*GPT, "strategy=streaming_diloco", "strategy.inner_steps=3", "strategy.fragment_blocks=1"),
    "easgd": (*DIGITS, "strategy=easgd", "strategy.period=3", "cluster.processes=4"),
}
DETERMINISTIC |= {
    name: (*DETERMINISTIC[name], "cluster.processes=3") for name in ("local_sgd", "diloco", "streaming_diloco")
}
BF16 = "precision=bf16"
ELASTIC = {  # 8 logical ranks, so that most ranks have several micro-batches
    "single": ("strategy=single", "cluster.processes=1"),
    "ddp": (BF16, "strategy=ddp", "cluster.processes=4"),
    "zero": (BF16, "strategy=zero", "cluster.processes=2"),
    "fsdp": (BF16, "strategy=fsdp", "cluster.processes=4"),
    "hsdp": (BF16, "strategy=hsdp", "strategy.shard=2", "cluster.processes=4"),
    "shards": (BF16, "strategy=hsdp", "strategy.shard=2", "strategy.accumulate=sharded", "cluster.processes=4"),
    "parameter_server": ("strategy=parameter_server", "cluster.processes=3"),
}
UPDATES = {
    "ddp": ("strategy=ddp", "cluster.processes=4"),
    "fsdp": ("strategy=fsdp", "strategy.wrap=size", "strategy.wrap_parameters=50", "cluster.processes=2"),
    "parameter_server": ("strategy=parameter_server", "strategy.servers=2", "cluster.processes=4"),
}


@pytest.fixture(autouse=True)
def _project(tmp_path: Path) -> None:
    players.write_project(tmp_path)


def disturbed(train: Any, *options: str) -> Any:
    """Run on a disordered heap; the last worker is killed in its seventh step, and the run restarts by itself."""
    size = int(next(word for word in reversed(options) if word.startswith("cluster.processes")).split("=")[1])
    # servers come first, so that the last process always trains
    kill = f"{{action: kill, rank: {size - 1}, step: 7}}"
    run = train(*options, *PACE, "launcher.max_restarts=1", f"faults=[{kill}, {PERTURBED}]")
    assert run.code == 0, run.error
    return run


# with other vector widths, the elastic runs below cover the other strategies, since their kernels are the same
OWN_ARITHMETIC = ("int8", "powersgd", "mesh", "hybrid_parameter_server")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[bits] * (name in OWN_ARITHMETIC)) for name in DETERMINISTIC]
)
def test_a_deterministic_run_that_is_killed_ends_with_its_own_bits_wherever_memory_lies(train: Any, name: str) -> None:
    options = ("reproducibility=deterministic", *DETERMINISTIC[name])
    undisturbed = train(*options, *PACE)
    assert undisturbed.code == 0, undisturbed.error
    assert outcome(disturbed(train, *options).folder) == outcome(undisturbed.folder)


@pytest.fixture
def one_process(reference_run: Any) -> Callable[..., tuple[str, str]]:
    """``one_process(*options)`` returns the digests of an undisturbed run of one process."""
    alone = ("reproducibility=elastic", *DIGITS, *PACE, "strategy=single", "cluster.processes=1")
    return lambda *options: digests(reference_run(*alone, *options))


def digests(run: Any) -> tuple[str, str]:
    assert run.code == 0, run.error
    result = run.json("result.json")
    return result["state_digest"], result["metrics_digest"]


@bits
@pytest.mark.parametrize("name", ELASTIC)
def test_an_elastic_run_that_is_killed_ends_with_the_bits_of_one_process_wherever_memory_lies(
    train: Any, one_process: Callable[..., tuple[str, str]], name: str
) -> None:
    run = disturbed(train, "reproducibility=elastic", *DIGITS, *ELASTIC[name])
    assert digests(run) == one_process(*(BF16 for word in ELASTIC[name] if word == BF16))


@bits
@pytest.mark.parametrize("name", UPDATES)
def test_an_elastic_run_of_several_updates_a_step_ends_with_the_bits_of_one_process_wherever_memory_lies(
    train: Any, name: str
) -> None:
    elastic = ("reproducibility=elastic", *PLAYERS, *PACE)
    alone = digests(train(*elastic, "strategy=single", "cluster.processes=1"))
    assert digests(disturbed(train, *elastic, *UPDATES[name])) == alone
