"""Real runs on a device: their losses, bits, records and measurements, beside the same runs on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.devices import CUDA, DEVICES, device_of
from tests.support.runs import environment
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.plan.calibrate import _is_memory
from worldsize.testing.recipes import Chain

GPT = (
    *("recipe=stdlib_lm", "recipe.width=32", "recipe.depth=2", "recipe.heads=2", "recipe.context=32"),
    *("recipe.test_bytes=2000", "batch_size=16", "cluster.processes=1", "cluster.threads=1", "log_every=1", "steps=4"),
)
STRATEGIES = ("single", "ddp", "zero", "fsdp", "hsdp", "mesh", "local_sgd", "diloco")
EXACT = "reproducibility=deterministic"


@pytest.fixture
def trained(train: Any) -> Callable[..., Any]:
    """``trained(device, ...)`` is a successful run on the device."""

    def run(device: str, *options: str) -> Any:
        done = train(*GPT, f"cluster.device={device}", *options)
        assert done.code == 0, done.error
        return done

    return run


def losses_of(run: Any) -> list[float]:
    return [row["loss"] for row in run.steps()]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_that_one_gpu_can_carry_has_the_losses_of_the_cpu(
    trained: Any, device: str, strategy: str
) -> None:
    expected, found = (losses_of(trained(each, f"strategy={strategy}")) for each in ("cpu", device))
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_have_nearly_the_losses_of_single_precision(trained: Any, device: str, precision: str) -> None:
    expected, found = (losses_of(trained(device, f"precision={each}")) for each in ("fp32", precision))
    compared = 1 if precision == "fp16" else 4  # the loss scale skips updates until it has adapted
    assert found[:compared] == pytest.approx(expected[:compared], rel=0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_an_exact_run_has_the_same_bits_again_after_a_kill_and_a_resume(trained: Any, device: str) -> None:
    killed = ("checkpoint.every=1", "faults=[{action: kill, rank: 0, step: 3}]", "launcher.max_restarts=1")
    runs = [trained(device, EXACT, "recipe.dropout=0.1", *options) for options in ((), killed)]
    first, again = (run.json("result.json") for run in runs)
    assert first["state_digest"] == again["state_digest"]
    assert len(runs[1].json("run_manifest.json")["attempts"]) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_records_its_device_and_measures_its_steps(trained: Any, device: str) -> None:
    run = trained(device, "profile.steps=[2,3]", "steps=6")
    result, text = run.json("result.json"), (run.folder / "run_manifest.json").read_text()
    assert result["peak_memory_bytes"] > 0
    rows = [row for row in run.steps() if row["compute_seconds"] is not None]
    assert rows
    assert all(row["compute_seconds"] > 0 and row["update_seconds"] > 0 for row in rows)
    (trace,) = run.folder.rglob("worker_00000.json")
    names = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "cpu_op" in names
    if device == "cuda":
        assert "kernel" in names
        assert torch.cuda.get_device_name(0) in text
        assert result["peak_device_bytes"] > 100_000
        assert (run.folder / "profile" / "worker_00000.memory.pickle").stat().st_size > 0


@pytest.mark.parametrize("device", [CUDA])
def test_the_peak_of_the_allocator_is_near_what_the_plan_says(
    trained: Any, command: Any, device: str, tmp_path: Path
) -> None:
    """The plan rehearses the run on the CPU, whose kernels need different temporary memory."""
    measured = trained(device, "strategy=single").json("result.json")["peak_device_bytes"]
    words = (*GPT, "strategy=single", "cluster.device=cpu", "--strategies", "single")
    said = command("plan", *words, cwd=tmp_path, environment=environment()).stdout
    (row,) = [line for line in said.splitlines() if line.startswith("│ single")]
    number, unit = row.split("│")[2].split()[:2]
    planned = float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert planned / 3 < measured < planned * 3


@pytest.mark.parametrize("device", DEVICES)
def test_the_doctor_finds_the_device(command: Any, device: str, tmp_path: Path) -> None:
    words = ("doctor", *GPT, f"cluster.device={device}")
    done = command(*words, cwd=tmp_path, environment=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("1 for 1 processes" in done.stdout) == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_data_are_pinned_and_copied_ahead_in_their_order(device: str) -> None:
    data, place = Chain().data("train"), device_of(device)

    def batches(where: torch.device) -> Iterator[Any]:
        return islice((each[0].data for each in micro_batches(data, Order(0, 8, 1, (0,)), where)), 5)

    for (inputs, targets), (expected, _) in zip(batches(place), batches(torch.device("cpu")), strict=True):
        assert (inputs.device.type, targets.device.type) == (device, device)
        assert torch.equal(inputs.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_is_short_is_known_by_its_error(device: str) -> None:
    with pytest.raises(RuntimeError) as short:
        torch.empty(2**55, dtype=torch.uint8, device=device_of(device))
    assert _is_memory(short.value)
