"""Proves that a recipe trains exactly as the program that it was written after.

def original(model, batches):            # the program's own loop, which takes its batches from here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    return model

def test_the_recipe_trains_as_the_program_does():
    same_losses(MyRecipe(), original, PortConfig(batch_size=32))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worldsize.config.compose import compose_only
from worldsize.config.composed import has_own_batches, settings_of
from worldsize.core import Recipe, Strategy
from worldsize.testing.port_causes import first_different, loss_causes, shown_difference, weight_difference
from worldsize.testing.port_processes import trained_in_processes
from worldsize.testing.port_runs import PortConfig, Reference, Trained, recipe_trained, reference_trained

__all__ = ["PortConfig", "Reference", "composed", "same_losses"]


def same_losses(
    recipe: Recipe,
    reference: Reference | Sequence[float],
    config: PortConfig,
    *,
    tolerance: float = 1e-6,
    strategy: Strategy | None = None,
    processes: int = 1,
) -> None:
    """Train ``recipe`` and ``reference`` on the same batches from the same weights, and compare losses, then weights.

    Args:
        recipe: The recipe under test.
        reference: The original program's loop, a generator ``reference(model, batches)``; or the losses that the
            original program has logged, one a step.

            It is called in one process with ``recipe.model()`` and an iterator of exactly the micro-batches that the
            recipe trains on, ``config.micro_batches`` of them a step. It yields the loss of each step, and may return
            its model, or a state_dict, at its end, in which the averages of ``config.average`` are called
            ``ema/<name>``. A program that builds a model of its own copies the weights first:
            ``own.load_state_dict(model.state_dict())``. Whenever it takes a micro-batch, torch's, NumPy's and
            Python's random generators are seeded as for the recipe, so that both draw the same dropout.
        config: The length of the training, and how its batches are made.
        tolerance: Largest difference of two losses, and of two numbers in the weights: absolute below 1, relative
            above it.
        strategy: Strategy that trains the recipe; None: a plain loop of this process.
        processes: Processes under ``strategy``, those that serve among them.

    Raises:
        AssertionError: a loss or a tensor of the weights differs; it names the first one, and what explains it.
    """
    expected = reference_trained(recipe, reference, config)
    if strategy is None:
        trained = recipe_trained(recipe, config)
    else:
        trained = trained_in_processes(recipe, config, strategy, processes)
    told = _difference(trained, expected, tolerance)
    if told is None:
        return
    if strategy is not None:
        name = f"{type(strategy).__name__} on {processes} {'process' if processes == 1 else 'processes'}"
        alone = recipe_trained(recipe, config)
        if _difference(alone, expected, tolerance) is None:
            raise AssertionError(
                f"{told}\nCause: {name}. A plain loop of one process computes what the reference does. Look for sums "
                "in another order (a larger tolerance), statistics over a batch, or a mean where loss should return "
                "a sum and its weight."
            )
        trained = alone
    causes = loss_causes(recipe, reference, config, trained, expected, tolerance)
    raise AssertionError("\n".join([told, *causes]))


def _difference(trained: Trained, expected: Trained, tolerance: float) -> str | None:
    """Describe where the losses differ first, or else where the weights do; None: they are the same."""
    if (step := first_different(trained.losses, expected.losses, tolerance)) is not None:
        return shown_difference(step, trained.losses[step - 1], expected.losses[step - 1], tolerance)
    if not expected.weights:
        return None
    return weight_difference(trained.weights, expected.weights, tolerance)


def composed(*overrides: str, steps: int = 20) -> tuple[Recipe, PortConfig]:
    """Build the recipe that ``train.py`` would train with ``overrides``, and the configuration of its steps.

    A step is one micro-batch unless ``logical_ranks`` says otherwise, however many processes the cluster has. So a test
    holds the recipe's YAML against the program too, such as its learning rate and its batch size:

        recipe, config = composed("recipe=sine")

    Args:
        overrides: The words of the command line.
        steps: Steps to compare, the first of the run; a schedule still has the length of the whole run.

    Raises:
        ConfigError: ``train.py`` would refuse the words.
    """
    cfg = compose_only(overrides)
    own_batches = has_own_batches(cfg)
    settings = settings_of(cfg)
    training = settings.training
    micro_batches = settings.config.get("logical_ranks") or 1
    config = PortConfig(
        batch_size=micro_batches if own_batches else training.batch_size,
        micro_batches=micro_batches,
        steps=min(steps, training.steps),
        seed=training.seed,
        numerics=settings.numerics,
        length_balanced=training.length_balanced,
        average=settings.average,
        device=torch.device("cpu"),
    )
    return settings.recipe, config
