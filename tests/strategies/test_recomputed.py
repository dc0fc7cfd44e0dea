"""Recomputing or moving activations changes nothing but memory, under every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.strategies.test_compile import GPT, code, trained
from worldsize.core import ConfigError, MicroBatch, Numerics, RunContext, World
from worldsize.core.numerics import ActivationCheckpointing
from worldsize.data.order import Order
from worldsize.plan.calibrate import calibrate
from worldsize.plan.rehearsal.memory import MemoryRecorder
from worldsize.strategies import model_passes
from worldsize.strategies.synchronous import create_local_replica
from worldsize.testing.recipes import Chain

ALONE = World.create_single(torch.device("cpu"))
STRATEGIES = {
    "single": ("strategy=single", "cluster.processes=1"),
    "fsdp": ("strategy=fsdp", "cluster.processes=2"),
    "parameter server": ("strategy=parameter_server", "cluster.processes=3"),
}
SELECTIVE = "activation_checkpointing=selective"
ELASTIC = "reproducibility=elastic"
APART = {
    "tensor": ("strategy=mesh", "strategy.tensor=2"),
    "pipeline": ("strategy=mesh", "strategy.pipeline=2"),
    "diloco": ("strategy=diloco", "strategy.inner_steps=3"),
    "easgd": ("strategy=easgd",),
    "hybrid": ("strategy=hybrid_parameter_server",),
}
__all__ = ["code"]


class Block(nn.Module):
    """Attention over the features of a sample, then a perceptron with running statistics and dropout."""

    def __init__(self, *, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(4 * width)
        self.dropout = dropout

    def forward(self, hidden_bw: Tensor) -> Tensor:
        heads_bhtd = hidden_bw.view(len(hidden_bw), 2, 4, -1)
        attended = nn.functional.scaled_dot_product_attention(
            heads_bhtd, heads_bhtd, heads_bhtd, dropout_p=self.dropout
        )
        wider: Tensor = self.down(self.norm(self.up(hidden_bw + attended.reshape_as(hidden_bw))).relu())
        return hidden_bw + nn.functional.dropout(wider, self.dropout)


class Counting(Block):
    """Counts its passes in a buffer, forbidden for recomputed blocks."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, hidden_bw: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(hidden_bw)


@dataclass(frozen=True)
class Blocks(Chain):
    """Three blocks of a kind."""

    kind: type[Block] = Block
    dropout: float = 0.2
    named: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = [self.kind(dropout=self.dropout) if self.kind is Block else self.kind() for _ in range(3)]
        return nn.Sequential(nn.Linear(7, 32), *blocks, nn.Linear(32, 3))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [each for each in model.modules() if isinstance(each, Block)] if self.named else []


def batches(steps: int, size: int = 64) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(size, 10, generator=generator) for _ in range(steps)]
    return [MicroBatch((each[:, :7], each[:, 7:]), seed=step, step=step) for step, each in enumerate(rows, 1)]


def weights(recipe: Blocks, **numerics: Any) -> Mapping[str, Tensor]:
    """Return the model after three steps."""
    model = recipe.model()
    replica = create_local_replica(recipe, model, RunContext(ALONE, Numerics(**numerics)))
    for batch in batches(3):
        replica.step([batch])
    return model.state_dict()


def peak(chosen: ActivationCheckpointing) -> int:
    """Return the most bytes of tensors in two steps."""
    recipe, recorder = Blocks(dropout=0.0), MemoryRecorder()
    with recorder.recording(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        replica = create_local_replica(
            recipe, recipe.model(), RunContext(ALONE, Numerics(activation_checkpointing=chosen))
        )
        recorder.log.begin_training()
        for batch in batches(2, size=2048):
            replica.step([batch])
    return recorder.log.compute_training_peak().nbytes


@cache
def expected(dropout: float) -> Mapping[str, Tensor]:
    return weights(Blocks(dropout=dropout))


@pytest.mark.parametrize("chosen", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_blocks_draw_the_same_masks_and_leave_running_statistics_alone(
    chosen: ActivationCheckpointing, dropout: float
) -> None:
    found = weights(Blocks(dropout=dropout), activation_checkpointing=chosen)
    assert found.keys() == expected(dropout).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected(dropout).items())


def test_more_recomputing_takes_less_memory_and_the_plan_knows() -> None:
    peaks = {chosen: peak(chosen) for chosen in get_args(ActivationCheckpointing)}
    assert peaks["full"] < 0.75 * peaks["none"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    order = Order(0, 2048, 1, (0,))
    for chosen, measured in peaks.items():
        work = calibrate(Blocks(dropout=0.0), Numerics(activation_checkpointing=chosen), order, "cpu")
        # the peak includes a block's gradients: the minimum is the kept activations
        assert work.activation_bytes < measured < 2 * work.activation_bytes, chosen


def test_a_block_that_changes_a_buffer_is_an_error_that_names_it() -> None:
    with pytest.raises(RuntimeError, match=r"Counting\.passes changes in each forward pass"):
        weights(Blocks(kind=Counting), activation_checkpointing="full")


def test_activations_come_back_from_the_host_as_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    # the CPU moves nothing, so copies stand in for tensors returned from the host
    parameter, activation = nn.Parameter(torch.ones(2**19)), torch.ones(2**19)
    moved: list[Tensor] = []

    def copied(tensor: Tensor) -> tuple[torch.device, Tensor]:
        moved.append(tensor)
        return tensor.device, tensor.clone()

    monkeypatch.setattr(model_passes, "to_host", copied)
    found = weights(Blocks(), activation_offload=True)
    assert moved
    assert all(torch.equal(found[name], tensor) for name, tensor in expected(0.2).items())
    monkeypatch.undo()
    assert model_passes.to_host(parameter)[1] is parameter
    assert model_passes.from_host(model_passes.to_host(activation)) is activation


@pytest.mark.heavy
def test_recomputed_runs_end_with_the_bits_of_those_that_keep_everything(train: Any) -> None:
    kept = trained(train, ELASTIC, *STRATEGIES["fsdp"])["state_digest"]
    for name, options in STRATEGIES.items():
        for chosen in ("full", "selective"):
            run = trained(train, ELASTIC, *options, f"activation_checkpointing={chosen}")
            assert run["state_digest"] == kept, (name, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("options", APART.values(), ids=APART)
def test_so_do_those_of_strategies_with_bits_of_their_own(train: Any, options: tuple[str, ...]) -> None:
    words = ("reproducibility=deterministic", "cluster.processes=2", *options)
    choices = [f"activation_checkpointing={chosen}" for chosen in ("none", "full", "selective")]
    assert len({trained(train, *words, choice)["state_digest"] for choice in choices}) == 1


@pytest.mark.slow
def test_compiled_runs_recompute_with_the_same_bits(train: Any, code: Any) -> None:
    options = (ELASTIC, "compile=true", *STRATEGIES["single"])
    kept, full = (trained(train, *options, f"activation_checkpointing={chosen}") for chosen in ("none", "full"))
    assert kept["state_digest"] == full["state_digest"]


@pytest.mark.slow
def test_the_compiler_recomputes_by_code_of_its_own(train: Any, code: Any) -> None:
    """It rounds and draws masks differently than code that keeps everything, but equally at any world size."""
    options = (ELASTIC, "compile=true", SELECTIVE)
    assert len({trained(train, *options, *STRATEGIES[name])["state_digest"] for name in ("single", "fsdp")}) == 1
    kept, selective = (trained(train, *options[:2], "recipe.dropout=0", *choice) for choice in ((), (SELECTIVE,)))
    assert selective["metrics"] == pytest.approx(kept["metrics"], rel=1e-3)


def test_what_recomputes_to_no_use_is_refused_before_the_start(train: Any) -> None:
    refused = {
        "requires Recipe.blocks, which Digits does not define": ("recipe=digits", "activation_checkpointing=full"),
        "got cluster.device=cpu": (*GPT, "activation_offload=true"),
        "did you mean 'full'?": (*GPT, "activation_checkpointing=ful"),
        "activation_checkpointing=full or none": (*GPT, SELECTIVE, "activation_offload=true"),
    }
    for message, options in refused.items():
        run = train(*options)
        assert (run.code, message in run.error) == (2, True), run.error


def test_compiled_norms_with_statistics_are_recomputed_as_a_whole_alone() -> None:
    numerics = Numerics(activation_checkpointing="selective", compile=True)
    with pytest.raises(ConfigError, match="running statistics"):
        model_passes.check_passes(Blocks(), Blocks().model(), numerics)
