"""Runs with embeddings on servers match plain PyTorch with whole tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.parameter_server.row_tables import find_tables, initial_rows
from recipes.word2vec.recipe import Word2Vec
from worldsize.checkpoint.format import read_checkpoint
from worldsize.checkpoint.load import read_tensors
from worldsize.data.loader import load_micro_batch
from worldsize.data.order import Order

pytestmark = pytest.mark.heavy

WORDS = ("recipe=word2vec", "recipe.dim=16", "recipe.min_count=20", "batch_size=96", "steps=8", "cluster.threads=1")
MOVING = ("schedule=cosine", "schedule.steps=8")  # a schedule independent of the run's length
ELASTIC = (*MOVING, "reproducibility=elastic", "logical_ranks=4", "evaluate_every=5", "seed=3")
SERVERS = "strategy=parameter_server"
HYBRID = "strategy=hybrid_parameter_server"


def weights(folder: Path) -> dict[str, Tensor]:
    return read_tensors(read_checkpoint(max((folder / "checkpoints").glob("step_*"))), "model")


ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)


def moving(step: int) -> float:
    """Return the factor on the learning rate under MOVING: after a warm-up step, a cosine down to a tenth."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * max(0, step - 2) / 7))


def reference(
    optimizer_of: Any = ADAGRAD, clip: float = float("inf"), factor: Callable[[int], float] = moving
) -> dict[str, Tensor]:
    """Train whole tables by hand, on whole batches of four parts."""
    recipe = Word2Vec(16, 5, 5, 20, False, optimizer_of)
    model = recipe.model()
    sparse = Word2Vec(16, 5, 5, 20, True, partial(torch.optim.Adagrad, lr=0.1))
    local = sparse.model()
    with torch.no_grad():
        for table in find_tables(local, sparse.row_values(local)):
            model.get_parameter(table.name).copy_(initial_rows(3, table, torch.arange(table.rows)))
    optimizer = recipe.optimizer(model)
    base = optimizer.param_groups[0]["lr"]
    dataset, order = recipe.data("train"), Order(seed=3, batch_size=96, logical_ranks=4, mine=(0,))
    for step in range(1, 9):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = base * factor(step)
        for rank in range(4):
            batch = load_micro_batch(dataset, order, torch.device("cpu"), step, rank)
            (recipe.loss(model, batch.data) / 4).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def assert_learned(folder: Path, expected: dict[str, Tensor]) -> None:
    trained = weights(folder)
    for name, tensor in expected.items():
        assert (trained[name] - tensor).norm() / tensor.norm() < 1e-6, (folder, name)


def digests(folder: Path) -> tuple[str, str]:
    """Return the digests of a run's state and metrics."""
    result = json.loads((folder / "result.json").read_text())
    return result["state_digest"], result["metrics_digest"]


@pytest.fixture
def one_server(reference_run: Any) -> Path:
    """The folder of a run with one server and one worker."""
    folder = reference_run(*WORDS, *ELASTIC, SERVERS, "cluster.processes=2").folder
    assert isinstance(folder, Path)
    return folder


WAYS = (
    (SERVERS, "cluster.processes=7", "strategy.servers=3"),
    (SERVERS, "cluster.processes=4", "strategy.servers=2", "strategy.sharding=range", "strategy.transport=tls"),
    (HYBRID, "cluster.processes=7", "strategy.servers=3"),
)


def test_tables_learn_what_they_learn_in_one_process_with_the_same_bits_on_any_servers_and_workers(
    train: Any, one_server: Path
) -> None:
    """The dense parameters are on the servers, or on the workers."""
    expected = reference()
    assert_learned(one_server, expected)
    for how in WAYS:
        run = train(*WORDS, *ELASTIC, *how)
        assert run.code == 0, run.error
        assert_learned(run.folder, expected)
        assert digests(run.folder) == digests(one_server), how


def test_gradients_on_servers_and_workers_are_clipped_by_their_common_norm(train: Any) -> None:
    clip, plain = 0.001, ("optimizer=sgd", "optimizer.momentum=0", "lr=100")
    run = train(*WORDS, *plain, "seed=3", HYBRID, "cluster.processes=6", "strategy.servers=2", f"clip_norm={clip}")
    assert run.code == 0, run.error
    assert all(step["grad_norm"] > clip for step in run.steps())
    assert_learned(run.folder, reference(partial(torch.optim.SGD, lr=100), clip, lambda step: 1.0))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (
            (SERVERS, "strategy.servers=2", "cluster.processes=4"),
            (SERVERS, "strategy.servers=1", "cluster.processes=3"),
        ),
        ((HYBRID, "strategy.servers=2", "cluster.processes=4"), (SERVERS, "strategy.servers=1", "cluster.processes=2")),
    ],
    ids=str,
)
def test_a_run_with_tables_resumes_with_another_number_of_servers(
    train: Any,
    command: Any,
    environment_without_wandb: dict[str, str],
    one_server: Path,
    first: tuple[str, ...],
    then: tuple[str, ...],
) -> None:
    run = train(*WORDS, *ELASTIC, *first, "steps=4")
    words = ("resume", str(run.folder), *then, "steps=8")
    done = command(*words, cwd=run.folder, environment=environment_without_wandb)
    assert done.returncode == 0, done.stderr
    assert digests(run.folder)[0] == digests(one_server)[0]


def test_rows_that_are_updated_asynchronously_learn_too(train: Any) -> None:
    options = ("recipe=word2vec", "recipe.dim=16", "batch_size=510", "steps=150", "cluster.threads=1")
    cached = (SERVERS, "strategy.consistency=bounded", "strategy.staleness=4", "strategy.cache_rows=4096")
    ways = ((SERVERS, "strategy.consistency=async"), (HYBRID, "strategy.consistency=async"), cached)
    runs = [train(*options, *how, "cluster.processes=4") for how in ways]
    assert [run.code for run in runs] == [0, 0, 0], [run.error for run in runs]
    losses = [[step["loss"] for step in run.steps()] for run in runs]
    assert all(sum(curve[-3:]) / 3 < 0.8 * curve[0] for curve in losses)
    (share,) = re.findall(r"(\d+)% of outer.weight cached", (runs[2].folder / "logs" / "worker_00000.log").read_text())
    assert int(share) > 10


def test_options_that_tables_do_not_support_are_refused(train: Any) -> None:
    run = train(*WORDS, HYBRID, "cluster.processes=2", "clip_norm=1.0", "strategy.consistency=async")
    assert run.code == 2
    assert "Set clip_norm=null" in run.error
    run = train(*WORDS, SERVERS, "cluster.processes=2", "optimizer=sgd")
    assert run.code == 2
    assert "Use SGD without momentum, Adagrad, Adam or AdamW" in run.error


def test_the_load_of_each_server_its_hottest_rows_and_the_times_of_each_worker_are_logged(train: Any) -> None:
    size = ("cluster.processes=4", "strategy.servers=2", "steps=40", "log_every=20")
    for how in (SERVERS, HYBRID):
        run = train(*WORDS, how, *size)
        servers = run.steps()[-1]["facts"]["servers"]
        assert len(servers) == 2
        assert all(server["pushes"] > 0 and server["bytes_in"] > 0 for server in servers)
        hottest = servers[0]["tables"]["outer.weight"]["hottest"]
        assert len(hottest) == 5
        assert all(times >= 1 for _, times in hottest)
        for worker in range(2 if how == SERVERS else 0):
            lines = (run.folder / "timing" / f"worker_{worker:05d}.jsonl").read_text().splitlines()
            last = json.loads(lines[-1])
            assert last["step"] == 40
            parts = [last[f"{phase}_seconds"] for phase in ("compute", "communication", "update")]
            assert sum(parts) == pytest.approx(last["step_seconds"], rel=1e-6)
            assert parts[0] > 0
            assert parts[1] > 0


def test_an_embedding_that_is_not_sparse_stays_dense() -> None:
    assert find_tables(nn.Sequential(nn.Embedding(3, 2), nn.EmbeddingBag(3, 2)), {}) == []
