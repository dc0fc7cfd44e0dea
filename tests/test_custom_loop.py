"""Strategies in a custom loop: the programs of its page, data, evaluation and refusals."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import worldsize as ws
from tests.docs.blocks import files
from tests.support.runs import REPOSITORY, environment
from worldsize.checkpoint.format import complete, read_checkpoint
from worldsize.checkpoint.weights import CheckpointWeights
from worldsize.core import MicroBatch
from worldsize.data.loader import load_micro_batch
from worldsize.data.order import Order
from worldsize.seeds import derive_seed, seed_generators
from worldsize.testing.worlds import run_in_worlds

PROGRAMS = files(REPOSITORY / "docs" / "howto" / "custom-loop.md")
INPUTS = torch.randn(101, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))
ALONE = ws.World.create_single(torch.device("cpu"))


def run_program(folder: Path, name: str, *words: str, processes: int = 1) -> str:
    """Run a program of the page in ``folder``, and return its output."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    begin = torchrun if processes > 1 else (sys.executable,)
    done = subprocess.run(
        [*begin, name, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.heavy
def test_a_custom_loop_has_the_same_bits_under_each_strategy_and_world_size(tmp_path: Path) -> None:
    def weights(*calls: tuple[str, int, int], dropout: float = 0.1) -> dict[str, Tensor]:
        folder = tmp_path / f"{calls}_{dropout}".replace(" ", "")
        (tmp_path / "loop.py").write_text(PROGRAMS["loop.py"].replace("Dropout(0.1)", f"Dropout({dropout})"))
        for strategy, processes, steps in calls:
            run_program(tmp_path, "loop.py", strategy, str(folder), str(steps), processes=processes)
        saved = CheckpointWeights(read_checkpoint(complete(folder)[-1]))
        return {name: saved.read_tensor(name) for name in saved.entries}

    alone, plain = weights(("Single", 1, 6)), weights(("Single", 1, 6), dropout=0.0)
    resumed = weights(("FSDP", 2, 3), ("DDP", 4, 6))
    assert all(torch.equal(alone[name], resumed[name]) for name in alone)
    by_hand = _by_hand(6)
    for name, each in plain.items():
        torch.testing.assert_close(each, by_hand[name], rtol=0, atol=1e-6)
    assert any(not torch.equal(alone[name], plain[name]) for name in alone)


def _by_hand(steps: int) -> dict[str, Tensor]:
    """Train the page's model without dropout in a plain loop, on whole batches."""
    torch.manual_seed(derive_seed(5, "init"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(1, steps + 1):
        parts = [torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in range(4)]
        inputs = torch.cat(parts)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


@pytest.mark.heavy
def test_the_port_prints_the_same_at_each_world_size_and_after_a_resume(tmp_path: Path) -> None:
    texts, port = [], PROGRAMS["port.py"]
    for strategy, processes in (("Single", 1), ("FSDP", 2)):
        folder = tmp_path / strategy
        folder.mkdir()
        text = ""
        if processes > 1:
            (folder / "port.py").write_text(port.replace("done + 1, 49", "done + 1, 17"))
            text = run_program(folder, "port.py", strategy, processes=processes)
        (folder / "port.py").write_text(port)
        texts.append(text + run_program(folder, "port.py", strategy, processes=processes))
    assert texts[0] == texts[1]
    lines = [line.split() for line in texts[0].splitlines()]
    assert [int(line[0]) for line in lines] == [16, 32, 48]
    assert float(lines[-1][2]) > 0.9


@pytest.mark.heavy
def test_the_program_that_is_ported_reaches_the_same_accuracy(tmp_path: Path) -> None:
    (tmp_path / "accelerate_loop.py").write_text(PROGRAMS["accelerate_loop.py"])
    lines = run_program(tmp_path, "accelerate_loop.py").splitlines()
    assert float(lines[-1].split()[-1]) > 0.9


def create_recipe(*, scheduled: bool = False) -> ws.LoopRecipe:
    def compute_metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        error = nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")
        return {"error": (error, torch.tensor(len(batch[1])))}

    return ws.LoopRecipe(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        (lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)) if scheduled else None,
        compute_metrics,
    )


def train(strategy: ws.Strategy, world: ws.World) -> tuple[list[float], float, str]:
    """Train three steps; return the mean losses, the error of DATA and the digest."""
    seed_generators(7, world.device)
    context = ws.RunContext(world, seed=3, logical_ranks=4)
    replica = strategy.replica(create_recipe(), context)
    batches = ws.sample_batches(DATA, replica, context, batch_size=40)
    losses = [ws.average_loss(replica.step(next(batches)), world) for _ in range(3)]
    return losses, ws.evaluate(replica, DATA, world, batch_size=7)["error"], ws.compute_digest(replica, world)


def test_losses_metrics_and_digests_equal_those_of_plain_pytorch_and_of_fsdp() -> None:
    alone = train(ws.Single(reduce="ordered"), ALONE)
    assert run_in_worlds(lambda world: train(ws.FSDP(reduce="ordered"), world), 2) == [alone, alone]
    seed_generators(7, ALONE.device)
    model, order = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), Order(3, 40, 1, (0,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in (1, 2, 3):
        x, y = DATA[order.compute_indices(step, 0, len(DATA))]
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        error = nn.functional.mse_loss(model(INPUTS), DATA.tensors[1]).item()
    assert [*alone[0], alone[1]] == pytest.approx([*losses, error], rel=1e-5)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_have_the_order_of_a_run(workers: int) -> None:
    context = ws.RunContext(ALONE, seed=3, logical_ranks=4)
    replica = ws.Single().replica(create_recipe(), context)
    batches = ws.sample_batches(DATA, replica, context, batch_size=40, first=1, workers=workers)
    order = Order(3, 40, 4, (0, 1, 2, 3))
    for step in (2, 3):  # epoch 2 starts within step 3
        for given, rank in zip(next(batches), range(4), strict=True):
            expected = load_micro_batch(DATA, order, ALONE.device, step, rank)
            assert (given.seed, given.step, given.logical_rank) == (expected.seed, step, rank)
            assert torch.equal(given.data[0], expected.data[0])


def test_batches_of_other_logical_ranks_and_sizes_are_refused() -> None:
    context = ws.RunContext(replace(ALONE, rank=1, size=2), logical_ranks=4)
    assert [each.logical_rank for each in ws.micro_batches({3: None, 1: None}, context, 1)] == [1, 3]  # cyclic
    assert [each.logical_rank for each in ws.micro_batches({3: None, 2: None}, context, 1)] == [2, 3]  # in blocks
    with pytest.raises(ws.ConfigError, match=r"missing: \[3\], unexpected: \[\]"):
        ws.micro_batches({1: None}, context, 1)
    with pytest.raises(ws.ConfigError, match=r"missing: \[\], unexpected: \[0\]"):
        ws.micro_batches({0: None, 1: None, 3: None}, context, 1)
    with pytest.raises(ws.ConfigError, match="logical_ranks=3 must be a multiple of the number of processes, 2"):
        ws.micro_batches({1: None}, replace(context, logical_ranks=3), 1)
    alone = ws.RunContext(ALONE, logical_ranks=4)
    replica = ws.Single().replica(create_recipe(), alone)
    with pytest.raises(ws.ConfigError, match="batch_size=30 must be a multiple of logical_ranks=4"):
        ws.sample_batches(DATA, replica, alone, batch_size=30)
    plain: Any = (INPUTS, DATA.tensors[1])
    with pytest.raises(ws.ConfigError, match=r"Pass the result of ws\.micro_batches"):
        replica.step([plain])
    without = ws.Single().replica(replace(create_recipe(), compute_metrics=None), alone)
    with pytest.raises(ws.ConfigError, match="Pass compute_metrics to it"):
        ws.evaluate(without, DATA, ALONE)


def test_a_restore_warns_of_other_logical_ranks_and_of_a_missing_schedule(tmp_path: Path) -> None:
    context = ws.RunContext(ALONE, logical_ranks=4)
    saved = ws.Single().replica(create_recipe(scheduled=True), context)
    saved.step([MicroBatch(DATA[:8], 0, 1, rank) for rank in range(4)])
    ws.save(saved, tmp_path, context, step=1)
    same = ws.Single().replica(create_recipe(scheduled=True), context)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*was saved by a different loop")
        assert ws.restore(same, tmp_path, context) == 1
    other = replace(context, logical_ranks=2)
    replica = ws.Single().replica(create_recipe(), other)
    with pytest.warns(UserWarning, match=r"\(logical_ranks: 4, now 2; schedule: True, now False\)"):
        assert ws.restore(replica, tmp_path, other) == 1
