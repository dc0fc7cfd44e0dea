"""Find out why losses differ, by retraining recipe and reference with changes such as other batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from worldsize.core import MicroBatch, Recipe
from worldsize.testing.port_alterations import NoDropout, explaining, find_worst_difference, relative
from worldsize.testing.port_runs import (
    PortConfig,
    Reference,
    Trained,
    initial_model,
    load_steps,
    recipe_trained,
    reference_trained,
)
from worldsize.testing.port_updates import different_update, update_causes

_ROUNDING = 1e-5  # relative difference of float32 sums in a different order after a few steps


def first_different(losses: Sequence[float], expected: Sequence[float], tolerance: float) -> int | None:
    """Return the first step, from 1, whose losses differ by more than ``tolerance``, or None."""
    pairs = enumerate(zip(losses, expected, strict=True), 1)
    return next((step for step, (loss, other) in pairs if relative(loss, other) > tolerance), None)


def format_loss_difference(step: int, loss: float, expected: float, tolerance: float) -> str:
    """Describe the first ``step`` with different losses, and the difference."""
    before = {1: "", 2: " The losses of step 1 match."}.get(step, f" The losses of steps 1 to {step - 1} match.")
    off = relative(loss, expected)
    return (
        f"the losses differ from step {step} on: the recipe has {loss!r}, the reference {expected!r} "
        f"(difference {off:.1e}, tolerance {tolerance:.0e}).{before}"
    )


def weight_difference(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> str | None:
    """Describe the first weight tensor that differs, and by how much, or return None.

    If names differ, tensors are compared in order, provided that their shapes match.
    """
    pairs = pair_tensors(weights, expected)
    if pairs is None:
        missing, more = sorted(weights.keys() - expected.keys()), sorted(expected.keys() - weights.keys())
        return (
            "the losses match, but the models have different tensors. Only the recipe's has "
            f"{', '.join(missing) or 'none'}; only the reference's has {', '.join(more) or 'none'}."
        )
    different = [
        (name, off)
        for name, ours, theirs in pairs
        if (off := _find_largest_difference(ours, theirs, tolerance)) is not None
    ]
    if not different:
        return None
    name, off = different[0]
    others = f"; {len(different)} of {len(pairs)} tensors differ" if len(different) > 1 else ""
    return (
        f"the losses match, but the weights after the last step do not: {name} differs by up to {off:.1e} (tolerance "
        f"{tolerance:.0e}){others}."
    )


def pair_tensors(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[tuple[str, Tensor, Tensor]] | None:
    """Pair the tensors of two models by name, else by order if shapes match, else None."""
    if weights.keys() == expected.keys():
        return [(name, tensor, expected[name]) for name, tensor in weights.items()]
    shapes = [[tensor.shape for tensor in model.values()] for model in (weights, expected)]
    if shapes[0] != shapes[1]:
        return None
    both = zip(weights.items(), expected.items(), strict=True)
    return [(f"{name} ({other})", ours, theirs) for (name, ours), (other, theirs) in both]


def _find_largest_difference(ours: Tensor, theirs: Tensor, tolerance: float) -> float | None:
    """Return the largest difference of two tensors, or None if within ``tolerance``."""
    if ours.shape != theirs.shape:
        return float("inf")
    first, second = ours.double(), theirs.double()
    difference = (first - second).abs()
    if bool((difference <= tolerance * second.abs().clamp(min=1.0)).all()):
        return None
    return float(difference.nan_to_num(float("inf")).max())


def loss_causes(
    recipe: Recipe,
    reference: Reference | Sequence[float],
    config: PortConfig,
    trained: Trained,
    expected: Trained,
    tolerance: float,
) -> list[str]:
    """Explain why two training runs differ: likely causes, one sentence each, most likely first.

    Args:
        recipe: Recipe under test.
        reference: The original program's loop, or its losses.
        config: Settings of the comparison.
        trained: Outcome of the recipe in a plain loop.
        expected: Outcome of the reference.
        tolerance: Maximum difference of losses considered equal.
    """
    step = first_different(trained.losses, expected.losses, tolerance)
    several = recipe.has_several_updates  # alterations assume one update per step
    if several and (step is None or (step > 1 and callable(reference))):
        return [_explain_updates(config.steps if step is None else step - 1)]
    if step is None:
        return update_causes(recipe, reference, config, config.steps + 1) if callable(reference) else []
    if callable(reference) and expected.taken and (told := _wrong_batches(expected.taken, config)):
        return [f"Cause: {told}"]
    cause = None if several else explaining(recipe, config, trained.losses, expected.losses, tolerance)
    if cause is not None:
        where = different_update(recipe, reference, config, step - 1) if callable(reference) and step > 1 else None
        told = f"Cause: {cause} With this change, the recipe computes the reference's losses."
        return [told] if where is None else [where, told]
    if told := _explain_scaled_loss(trained.losses, expected.losses, config):
        return [f"Cause: {told}"]
    if not callable(reference):
        return [_explain_missing_loop(step)]
    if find_worst_difference(trained.losses, expected.losses) < _ROUNDING:
        return ["Cause: probably rounding in sums of a different order. If this is expected, increase the tolerance."]
    if step == 1:
        return [f"Cause: {_explain_first_loss(recipe, reference, config, trained, expected)}"]
    return update_causes(recipe, reference, config, step)


def _wrong_batches(taken: Sequence[int], config: PortConfig) -> str | None:
    """Return the cause if the reference uses a different number of micro-batches per step, else None."""
    first, wanted = taken[0], config.micro_batches
    if first == 0:
        return (
            "the batches: the reference yielded its first loss without using the passed batches. Iterate over the "
            "argument of the reference instead of a separate loader."
        )
    if first != wanted:
        return (
            f"the batches per step: the reference takes {first} before it yields a loss, but the recipe trains on "
            f"{wanted}. Set PortConfig(micro_batches={first}) (logical_ranks of a run), or yield one loss per step."
        )
    return None


def _explain_scaled_loss(losses: Sequence[float], expected: Sequence[float], config: PortConfig) -> str | None:
    """Return the cause if the losses are a constant multiple of the recipe's, else None."""
    if len(losses) < 2 or 0.0 in losses:
        return None
    factors = [other / loss for loss, other in zip(losses, expected, strict=True)]
    if max(abs(factor / factors[0] - 1) for factor in factors) > _ROUNDING or abs(factors[0] - 1) < _ROUNDING:
        return None
    known = {config.batch_size: "samples of a batch", config.micro_batches: "micro-batches of a step"}
    meaning = next((f", the number of {what}" for size, what in known.items() if abs(factors[0] / size - 1) < 1e-5), "")
    return (
        f"the scale of the loss: in every step the reference's loss is {factors[0]:.6g} times the recipe's{meaning}. "
        "The training is the same. Yield a mean from the reference, as in the recipe."
    )


def _explain_first_loss(
    recipe: Recipe, reference: Reference, config: PortConfig, trained: Trained, expected: Trained
) -> str:
    """Return why losses differ in step 1: weights, batch, dropout, or the loss itself."""
    one = replace(config, steps=1)
    ours, theirs = trained.losses[0], expected.losses[0]
    if reference_trained(recipe, reference, one, model=build_perturbed_model(recipe, one)).losses[0] == theirs:
        return (
            "the initial weights: the reference does not start from the passed model. If it builds a separate model, "
            "copy the weights: own.load_state_dict(model.state_dict())."
        )
    if reference_trained(recipe, reference, one, steps=other_batches(recipe, one)).losses[0] == theirs:
        return "the batches: the reference takes the passed batches, but its loss does not depend on them."
    with NoDropout():
        ours_without = recipe_trained(recipe, one).losses[0]
        theirs_without = reference_trained(recipe, reference, one).losses[0]
    if relative(ours_without, theirs_without) < min(_ROUNDING, relative(ours, theirs) / 10):
        if relative(ours, theirs_without) < _ROUNDING:
            return "dropout: the reference uses dropout, but the recipe's model has none or is in evaluation mode."
        return (
            "dropout: the losses match without dropout. The random numbers differ: the reference draws some between "
            "fetching a micro-batch and calling the model (or fetches the next one first), sets its own seed, or uses "
            "dropout at a different rate or place."
        )
    return (
        f"the loss: with the same weights, the same batch and no dropout, the recipe has {ours_without!r} and the "
        f"reference {theirs_without!r}. Compare Recipe.loss, Recipe.collate and the mode of the model with those of "
        "the program."
    )


def build_perturbed_model(recipe: Recipe, config: PortConfig) -> nn.Module:
    """Build the recipe's model with different initial weights."""
    model = initial_model(recipe, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.03125)
    return model


def other_batches(recipe: Recipe, config: PortConfig) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of later steps, with the random seeds of the first steps."""
    order = config.order()
    later = islice(load_steps(recipe, replace(config, steps=2 * config.steps)), config.steps, None)
    for number, step in enumerate(later, 1):
        yield [replace(batch, seed=order.step_seed(number, rank)) for rank, batch in enumerate(step)]


def _explain_updates(step: int) -> str:
    return (
        f"Cause: an update of step {step} or earlier. Compare Recipe.updates and Recipe.optimizers with the program's "
        "loop: the order and options of the optimizers, and the losses of their gradients."
    )


def _explain_missing_loop(step: int) -> str:
    if step == 1:
        return (
            "The loss of step 1 depends on the initial weights, the batch, dropout and the loss function. Pass the "
            "program's loop instead of its losses to find the cause."
        )
    return (
        f"The update of step {step - 1} differs: the gradient, its clipping, or the optimizer's arguments. Pass the "
        "program's loop instead of its losses to find the cause."
    )
