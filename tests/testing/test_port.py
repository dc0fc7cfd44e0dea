"""A port is proved by the losses and weights of the original program, and what makes them other ones is named."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from plugins.easgd.strategy import EASGD
from worldsize.core import ConfigError, Numerics, Recipe, Strategy
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.parameter_server.strategy import ParameterServer
from worldsize.testing import PortConfig, composed, same_losses
from worldsize.testing.port_runs import recipe_trained
from worldsize.testing.recipes import TwoPlayers

Batch = tuple[Tensor, Tensor]
Losses = Generator[Any, None, nn.Module]  # yields losses, returns the model


@final
class _Sequences(Dataset[Any]):
    """Sequences of 3 to 9 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 10, (48,), generator=generator).tolist()
        self.rows = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 20)
    )


def rates(step: int) -> float:
    return 1 / (1 + step)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def nats(model: nn.Module, rows_bt: Tensor) -> tuple[Tensor, Tensor]:
    targets_bt = rows_bt[:, 1:]
    loss = F.cross_entropy(model(rows_bt[:, :-1]).flatten(0, 1), targets_bt.flatten(), ignore_index=0, reduction="sum")
    return loss, (targets_bt != 0).sum()


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]


@final
@dataclass(frozen=True)
class Port(Recipe):
    """Predict the next token."""

    dropout: float = 0.0
    weighted: bool = True
    scheduled: bool = True

    def model(self) -> nn.Module:
        return net(self.dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(groups(model), lr=0.01)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return LambdaLR(optimizer, rates) if self.scheduled else None

    def data(self, split: str) -> _Sequences:
        return _Sequences()

    def collate(self, samples: list[Tensor]) -> Tensor:
        return pad(samples)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        total, count = nats(model, batch)
        return (total, count) if self.weighted else total / count

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"nats": nats(model, batch)}


@dataclass(frozen=True)
class Program:
    """A program's loop, with the mistakes that are planted."""

    own_model: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: torch.optim.AdamW(groups(model), lr=0.01)
    early: int = 0
    pieces: int = 1
    means: bool = False
    draws: bool = False
    zero_grad: bool = True
    clip: float | None = None
    times: float = 1.0

    def __call__(self, model: nn.Module, batches: Iterator[Tensor]) -> Losses:
        own = self.own_model(model)
        optimizer = self.optimizer(own)
        step = 0
        while micro_batches := [batch for _, batch in zip(range(self.pieces), batches, strict=False)]:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first", group["lr"]) * rates(max(step + self.early, 0))
            if self.draws:
                torch.rand(1)
            losses = [nats(own, rows_bt) for rows_bt in micro_batches]
            if self.means:
                loss = torch.stack([total / count for total, count in losses]).mean()
            else:
                loss = torch.stack([total for total, _ in losses]).sum() / sum(int(count) for _, count in losses)
            if self.zero_grad:
                optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if self.clip:
                nn.utils.clip_grad_norm_(own.parameters(), self.clip)
            optimizer.step()
            step += 1
            yield loss.detach() * self.times
        return own


CONFIG = PortConfig(batch_size=8, steps=6)


def told(recipe: Recipe, reference: Any, config: PortConfig = CONFIG, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        same_losses(recipe, reference, config, **options)
    return str(caught.value)


def copy_of(model: nn.Module) -> nn.Module:
    own = nn.ModuleDict({"body": net()})
    own.forward = own["body"].forward
    own["body"].load_state_dict(model.state_dict())
    return own


def test_a_right_port_passes() -> None:
    same_losses(Port(), Program(), CONFIG)
    same_losses(Port(dropout=0.3), Program(), CONFIG)
    same_losses(Port(), Program(own_model=copy_of), CONFIG)  # whose weights have names of their own
    same_losses(Port(), Program(pieces=4), PortConfig(batch_size=8, micro_batches=4, steps=6), tolerance=1e-5)


def test_losses_that_were_logged_are_enough() -> None:
    kept: list[float] = []

    def reference(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[float]:
        for loss in Program()(model, batches):
            kept.append(float(loss))
            yield kept[-1]

    same_losses(Port(), reference, CONFIG)
    same_losses(Port(), kept, CONFIG)
    assert "step 4 on" in told(Port(), [*kept[:3], 7.0, 7.0, 7.0])


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        (DDP(), 2),
        (DDP(reduce="ordered"), 2),
        (FSDP(wrap="size", wrap_parameters=1), 2),
        (ParameterServer(servers=2), 4),
        (ParameterServer(transport="tls", reduce="ordered"), 2),
    ],
    ids=lambda each: f"{type(each).__name__}-{each.reduce}" if isinstance(each, Strategy) else str(each),
)
def test_a_right_port_passes_under_a_strategy(strategy: Strategy, processes: int) -> None:
    config = PortConfig(batch_size=8, micro_batches=2, steps=4)
    same_losses(Port(), Program(pieces=2), config, strategy=strategy, processes=processes, tolerance=1e-5)


def test_a_strategy_that_averages_otherwise_is_named_as_the_cause() -> None:
    config = PortConfig(batch_size=8, micro_batches=2, steps=3)
    lossy = DDP(compress="int8")
    text = told(Port(), Program(pieces=2), config, strategy=lossy, processes=2, tolerance=1e-5)
    assert "Cause: DDP on 2 processes." in text


@dataclass(frozen=True)
class Faster(TwoPlayers):
    """Players of whom the one learns faster than the original's."""

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        optimizers = super().optimizers(model)
        optimizers["player"].param_groups[0]["lr"] *= 2
        return optimizers


def test_a_recipe_with_several_updates_a_step_is_told_where_it_differs() -> None:
    config = PortConfig(batch_size=8, steps=4)
    own = recipe_trained(TwoPlayers(), config).losses
    same_losses(TwoPlayers(), own, config)
    text = told(Faster(), own, config)
    assert "the losses differ from step 2 on" in text
    with pytest.raises(AssertionError, match="Cause: an update of step 1 or of one before: which optimizers step"):
        same_losses(Faster(), lambda model, batches: original(model, batches, own), config)


def original(model: nn.Module, batches: Iterator[Any], losses: Sequence[float]) -> Losses:
    """Take a batch a step, as the original's loop does, and say its losses."""
    for loss in losses:
        next(batches)
        yield loss
    return model


def test_where_servers_serve_beside_replicas_both_take_part() -> None:
    """EASGD's losses are those of workers that train apart: the comparison ends, and says that they are others."""
    config = PortConfig(batch_size=8, micro_batches=2, steps=4)
    text = told(Port(), Program(pieces=2), config, strategy=EASGD(period=1), processes=3, tolerance=1e-5)
    assert "EASGD on 3 processes" in text


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batches=2"):
        same_losses(Port(), Program(), CONFIG, strategy=ParameterServer(), processes=3)
    with pytest.raises(ConfigError, match="micro_batches=2"):
        same_losses(Port(), Program(), CONFIG, strategy=DDP(), processes=2)


def shuffled_alike(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
    rows = _Sequences().rows
    own = [pad(rows[first : first + 8]) for first in range(0, 48, 8)]
    return Program()(model, (row for row, _ in zip(own, batches, strict=False)))


def deeper(_: nn.Module) -> nn.Module:
    return nn.Sequential(*net(), nn.Linear(20, 20))


def frozen(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([each for each in groups(model)[:1]], lr=0.01)


PLANTED: dict[str, tuple[Any, list[str]]] = {
    "order": (shuffled_alike, ["step 1 on", "the order of samples"]),
    "initial weights": (
        Program(own_model=lambda _: nn.Sequential(*net(), nn.Linear(20, 20))),
        ["step 1 on", "does not start from the model"],
    ),
    "schedule one ahead": (Program(early=1), ["step 2 on", "one step ahead"]),
    "schedule one behind": (Program(early=-1), ["step 3 on", "one step behind"]),
    "decay of all": (
        Program(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)),
        ["step 2 on", "step 1 differs in 3 of 7 tensors: 1.weight, 2.bias, 5.bias", "decays biases and norms"],
    ),
    "other decay": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model, decay=0.3), lr=0.01)),
        ["step 2 on", "weight decay: the reference takes 0.002 of these weights"],
    ),
    "usual decay": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model, decay=0.0), lr=0.01)),
        ["step 2 on", "decays nothing"],
    ),
    "rate": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model, decay=0.0), lr=0.03)),
        ["step 2 on", "The update of step 1 differs in all tensors"],
    ),
    "left out": (Program(optimizer=frozen), ["step 2 on", "does not train 1.weight, 1.bias, 2.bias, 5.bias"]),
    "betas": (
        Program(optimizer=lambda model: torch.optim.AdamW(groups(model), lr=0.01, betas=(0.9, 0.95))),
        ["step 3 on", "betas=(0.9, 0.95)"],
    ),
    "no zero_grad": (Program(zero_grad=False), ["does not set gradients to zero"]),
    "sum": (Program(times=8.0), ["8 times the recipe's, the number of samples"]),
    "pieces": (Program(pieces=3), ["2 losses for 6 steps, for 6 micro-batches", "micro_batches"]),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found_and_named(mistake: str) -> None:
    reference, words = PLANTED[mistake]
    text = told(Port(), reference)
    assert [word for word in words if word not in text] == [], text


def test_dropout_is_told_from_the_batch_and_the_weights() -> None:
    recipe = Port(dropout=0.3)
    assert "Cause: dropout: without it the losses are the same." in told(recipe, Program(draws=True))
    assert "without dropout: is its model in evaluation mode" in told(recipe, Program(own_model=nn.Module.eval))
    assert "the recipe's model has none" in told(Port(), Program(own_model=dropping))


def dropping(model: nn.Module) -> nn.Module:
    own = net(0.3)
    own.load_state_dict(model.state_dict())
    return own


def test_a_mean_of_means_is_told_from_a_mean_over_all() -> None:
    config = PortConfig(batch_size=12, micro_batches=4, steps=4)
    same_losses(Port(weighted=False), Program(pieces=4, means=True), config, tolerance=1e-5)
    averaged = told(Port(), Program(pieces=4, means=True), config)
    assert "the reference averages the means of its micro-batches" in averaged
    summed = told(Port(weighted=False), Program(pieces=4), config)
    assert "the reference's loss is the mean over the whole batch of a step" in summed


def test_clipping_on_one_side_is_named() -> None:
    clipped = PortConfig(batch_size=8, steps=6, numerics=Numerics(clip_norm=0.01))
    same_losses(Port(), Program(clip=0.01), clipped)
    assert "the reference does not clip its gradient, and the recipe to a norm of 0.01" in told(
        Port(), Program(), clipped
    )


def test_batches_that_are_not_taken_are_named() -> None:
    def own_data(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
        return iter(list(Program()(model, iter([pad(_Sequences().rows[:8])] * 6))))

    def other_use(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
        return Program()(model, (pad(_Sequences().rows[:8]) for _ in batches))

    assert "without taking one of those that it is handed" in told(Port(), own_data)
    assert "its loss does not depend on them" in told(Port(), other_use)


def test_sums_in_another_order_are_rounding() -> None:
    in_pieces = Program(pieces=4)
    text = told(Port(), in_pieces, PortConfig(batch_size=8, micro_batches=4, steps=6), tolerance=0.0)
    assert "Cause: rounding, most likely" in text


def test_another_loss_is_named_last() -> None:
    def smoothed(model: nn.Module, batches: Iterator[Tensor]) -> Iterator[Any]:
        for rows_bt in batches:
            logits = model(rows_bt[:, :-1]).flatten(0, 1)
            yield F.cross_entropy(logits, rows_bt[:, 1:].flatten(), ignore_index=0, label_smoothing=0.2)

    assert "Cause: the loss: with the same weights, the same batch and no dropout" in told(Port(), smoothed)


def test_weights_are_compared_after_the_last_loss() -> None:
    def restless(model: nn.Module, batches: Iterator[Tensor]) -> Losses:
        model = yield from Program()(model, batches)
        with torch.no_grad():
            next(model.parameters())[1, 1] += 0.5
        return model

    text = told(Port(), restless)
    assert "the losses are the same, but not the weights after the last step: 0.weight differs by up to 5.0e-01" in text
    assert "The update of step 6 differs in 1 of 7 tensors: 0.weight" in text


def test_the_yaml_is_part_of_what_is_proved() -> None:
    recipe, config = composed("recipe=digits", "steps=2", "seed=4", "numerics.clip_norm=0.5", "schedule=constant")
    assert (config.steps, config.seed, config.numerics.clip_norm) == (2, 4, 0.5)

    def original(model: nn.Module, batches: Iterator[Batch]) -> Losses:
        optimizer = recipe.optimizer(model)
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss
        return model

    same_losses(recipe, original, config)
