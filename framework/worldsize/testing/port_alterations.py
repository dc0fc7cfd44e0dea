"""Typical mistakes in a port: alterations that may explain the reference's losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from worldsize.core import LossOutput, MicroBatch, Recipe
from worldsize.data.batches import fetch_batch, get_collate_fn, is_iterable
from worldsize.optimizers.groups import create_optimizer
from worldsize.seeds import seed_generators
from worldsize.strategies.model_replica import autocast
from worldsize.testing.port_runs import PortConfig, initial_model, load_steps

_DROPOUTS = (F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)


@final
class NoDropout(TorchFunctionMode):
    """Disables all dropout, whether the model is in training or evaluation mode."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0]
        if func is F.scaled_dot_product_attention and len(args) > 4:  # query, key, value, mask, probability
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            named["training"] = False
        return func(*args, **named)


@final
@dataclass(frozen=True)
class Alteration:
    """One possible difference between the reference and the recipe.

    Attributes:
        cause: The message to report if it explains the losses.
        mean: The loss of a step: "all", total loss / total weight, or "means", the mean of the micro-batches' means.
        divides: Whether gradients are averaged over micro-batches instead of summed.
        zero_grad: Whether gradients are zeroed before each step.
        schedule: Learning rate used by a step: its own, the next or previous step's, or always the first.
        groups: Changes the optimizer's groups before the first step.
        clip: Maximum gradient norm. None for no clipping, "recipe" for the configured norm.
        dropout: Whether dropout is enabled.
        full_batch: Whether to compute the whole batch of a step at once.
        shuffled: Whether samples are in the order of the run instead of the data set's.
    """

    cause: str
    mean: Literal["all", "means"] = "all"
    divides: bool = True
    zero_grad: bool = True
    schedule: Literal["own", "next", "previous", "first"] = "own"
    groups: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None
    clip: float | Literal["recipe"] | None = "recipe"
    dropout: bool = True
    full_batch: bool = False
    shuffled: bool = True


def train_with_alteration(recipe: Recipe, config: PortConfig, alteration: Alteration) -> Iterator[float]:
    """Train ``recipe`` in a plain loop with one alteration, and yield the loss of each step."""
    if alteration.full_batch:
        config = replace(config, micro_batches=1)
    model = initial_model(recipe, config)
    optimizer = create_optimizer(recipe, model)
    alteration.groups(model, optimizer)
    schedule = recipe.schedule(optimizer)
    if schedule is not None and alteration.schedule == "next":
        _advance_schedule(schedule)
    limit = config.numerics.clip_norm if alteration.clip == "recipe" else alteration.clip
    steps = load_steps(recipe, config) if alteration.shuffled else _fetch_in_order(recipe, config)
    for number, step in enumerate(steps, 1):
        if alteration.zero_grad:
            optimizer.zero_grad()
        yield _backward(recipe, model, step, config, alteration)
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if schedule is not None and alteration.schedule != "first" and (alteration.schedule, number) != ("previous", 1):
            _advance_schedule(schedule)


def _advance_schedule(schedule: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore torch's warning that the optimizer must step first
        schedule.step()


def _backward(
    recipe: Recipe, model: nn.Module, step: Sequence[MicroBatch], config: PortConfig, alteration: Alteration
) -> float:
    """Accumulate the gradient of ``step`` in the parameters, and return its loss."""
    sums, weights = [], []
    before = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    for batch in step:
        seed_generators(batch.seed, config.device)
        without: AbstractContextManager[Any] = nullcontext() if alteration.dropout else NoDropout()
        with without, autocast(config.device, config.numerics.precision):
            loss = LossOutput.from_loss(recipe.micro_batch_loss(model, batch)).loss
            total, weight = loss if isinstance(loss, tuple) else (loss, torch.ones(()))
            if alteration.mean == "means":
                total, weight = total / weight, torch.ones(())
        total.backward()  # type: ignore[no-untyped-call]
        sums.append(float(total.detach()))
        weights.append(float(weight))
    factor = 1 / sum(weights) if alteration.divides else 1.0
    for parameter, old in zip(model.parameters(), before, strict=True):
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor if old is None else old + (parameter.grad - old) * factor
    return sum(sums) / sum(weights)


def _fetch_in_order(recipe: Recipe, config: PortConfig) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each step in the order of the data set's samples."""
    data, order, collate = recipe.data("train"), config.order(), get_collate_fn(recipe)
    for step in range(1, config.steps + 1):
        places = [torch.tensor([*chain(*order.positions(step, rank))]) % len(data) for rank in order.mine]
        yield [
            MicroBatch(fetch_batch(data, indices, collate), order.step_seed(step, rank), step, rank)
            for rank, indices in zip(order.mine, places, strict=True)
        ]


def alterations(recipe: Recipe, config: PortConfig) -> list[Alteration]:
    """List possible alterations, the most frequent mistakes first."""
    several = config.micro_batches > 1
    return [
        *(_list_data_alterations(recipe)),
        *(_list_mean_alterations() if several else ()),
        Alteration(
            "the reference trains without dropout. Check whether its model is in evaluation mode or has a different "
            "dropout rate.",
            dropout=False,
        ),
        *_list_schedule_alterations(recipe, config),
        *_list_clipping_alterations(config),
        Alteration("the reference does not zero gradients before each step.", zero_grad=False),
        *_list_group_alterations(),
    ]


def _list_data_alterations(recipe: Recipe) -> list[Alteration]:
    if is_iterable(recipe.data("train")):
        return []
    return [
        Alteration(
            "the order of samples: the reference does not shuffle the data set. Iterate over the passed batches, or "
            "compare with losses of a program with the same shuffling.",
            shuffled=False,
        )
    ]


def _list_mean_alterations() -> list[Alteration]:
    return [
        Alteration(
            "a mean of means instead of an overall mean: the reference averages the means of its micro-batches, but "
            "Recipe.loss returns (sum, weight). Return the mean from loss to match the reference.",
            mean="means",
        ),
        Alteration(
            "an overall mean instead of a mean of means: the reference's loss is the mean over the whole batch of a "
            "step, but Recipe.loss returns a mean for each micro-batch. Return (sum, weight) from loss.",
            full_batch=True,
        ),
        Alteration(
            "gradient accumulation: the reference sums the gradients of its micro-batches without dividing by their "
            "number or weight.",
            divides=False,
        ),
    ]


def _list_schedule_alterations(recipe: Recipe, config: PortConfig) -> list[Alteration]:
    if recipe.schedule(create_optimizer(recipe, initial_model(recipe, config))) is None:
        return []
    told = "the learning-rate schedule: "
    return [
        Alteration(
            told + "the reference is one step ahead. It advances the schedule before optimizer.step(), or counts "
            "steps from 1. Use the rate of step + 1 in the recipe's schedule.",
            schedule="next",
        ),
        Alteration(
            told + "the reference is one step behind. Its second step still uses the rate of the first. Use the rate "
            "of step - 1 in the recipe's schedule.",
            schedule="previous",
        ),
        Alteration(told + "the reference keeps the rate of its first step.", schedule="first"),
    ]


def _list_clipping_alterations(config: PortConfig) -> list[Alteration]:
    if config.numerics.clip_norm is None:
        return [Alteration("the reference clips gradients to a norm of 1. Set clip_norm=1.", clip=1.0)]
    told = f"the reference does not clip gradients, but the recipe clips to a norm of {config.numerics.clip_norm}."
    return [Alteration(told, clip=None)]


def _list_group_alterations() -> list[Alteration]:
    told = "the weight decay of parameter groups: the reference "
    return [
        Alteration(told + "decays all weights, including biases and norms.", groups=_decay_all),
        Alteration(told + "does not decay biases and norms (one-dimensional parameters).", groups=_decay_matrices),
        Alteration(told + "decays nothing.", groups=lambda _, optimizer: _set_option(optimizer, "weight_decay", 0.0)),
        Alteration(
            told + "decays by 0.01, the default of torch.optim.AdamW.",
            groups=lambda _, optimizer: _set_option(optimizer, "weight_decay", 0.01),
        ),
        *_list_argument_alterations(),
    ]


def _list_argument_alterations() -> list[Alteration]:
    usual = {
        "momentum": (0.0, 0.9),
        "nesterov": (True, False),
        "betas": ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98)),
        "eps": (1e-8, 1e-6),
        "amsgrad": (True,),
    }
    return [
        Alteration(
            f"an optimizer argument: the reference has {name}={value}.",
            groups=lambda _, optimizer, name=name, value=value: _set_option(optimizer, name, value),  # type: ignore[misc]
        )
        for name, values in usual.items()
        for value in values
    ]


def _set_option(optimizer: Optimizer, name: str, value: Any) -> None:
    for group in optimizer.param_groups:
        if name in group:
            group[name] = value


def _decay_all(_: nn.Module, optimizer: Optimizer) -> None:
    _set_option(optimizer, "weight_decay", max(group.get("weight_decay", 0.0) for group in optimizer.param_groups))


def _decay_matrices(_: nn.Module, optimizer: Optimizer) -> None:
    for group in list(optimizer.param_groups):
        if "weight_decay" in group:
            plain = [each for each in group["params"] if each.ndim < 2]
            group["params"] = [each for each in group["params"] if each.ndim >= 2]
            if plain:
                optimizer.add_param_group({**group, "params": plain, "weight_decay": 0.0})


def explaining(
    recipe: Recipe, config: PortConfig, losses: Sequence[float], expected: Sequence[float], tolerance: float
) -> str | None:
    """Return the cause of the alteration that best reproduces the losses ``expected``, or None.

    Args:
        recipe: Recipe under test.
        config: Settings of the comparison.
        losses: Losses of the unaltered recipe.
        expected: Losses of the reference.
        tolerance: Tolerance of the comparison; an explanation may differ by this, or 1% of the difference if larger.
    """
    allowed = max(tolerance, find_worst_difference(losses, expected) / 100)
    explained: dict[str, float] = {}
    for alteration in alterations(recipe, config):
        off = 0.0
        for number, loss in zip(count(), _try_alteration(recipe, config, alteration), strict=False):
            off = max(off, relative(loss, expected[number]))
            if off > allowed:
                break
        else:
            explained.setdefault(alteration.cause, off)
    return min(explained, key=lambda cause: explained[cause]) if explained else None


def _try_alteration(recipe: Recipe, config: PortConfig, alteration: Alteration) -> Iterator[float]:
    """Yield the losses of an alteration, or NaN if it does not apply to the recipe."""
    try:
        yield from train_with_alteration(recipe, config, alteration)
    except (ValueError, RuntimeError, KeyError, TypeError):
        yield float("nan")


def relative(loss: float, expected: float) -> float:
    """Return the difference of two losses: absolute if ``expected`` is below 1, else relative."""
    difference = abs(loss - expected) / max(1.0, abs(expected))
    return difference if difference == difference else float("inf")


def find_worst_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference between two series of losses; see :func:`relative`."""
    return max(map(relative, losses, expected))
