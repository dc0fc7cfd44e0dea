"""Refuses to repeat or resume steps of recipes that keep values from step to step without saving them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from worldsize.core import ConfigError, LaunchMethod, Recipe, Role, saves_state
from worldsize.world.roles import heals

_logger = logging.getLogger(__name__)


def check_remembers(recipe: Recipe, roles: Mapping[str, Role], launcher: LaunchMethod, *, exact: str | None) -> None:
    """Raise ConfigError if processes may start again or heal, and the recipe keeps values that no checkpoint has.

    ``exact``: the reproducibility mode if it promises bits.
    """
    if not recipe.remembers or saves_state(recipe):
        return
    fact = f"{type(recipe).__name__} keeps values from step to step (remembers = True), which no checkpoint has"
    if heals(roles):
        raise ConfigError(
            f"strategy.on_failure=heal: {fact}, and they are lost with a process. Define its methods state and "
            "load_state, or set strategy.on_failure=restart."
        )
    if exact and launcher.max_restarts:
        raise ConfigError(
            f"launcher.max_restarts={launcher.max_restarts}: {fact}: a restart would train other weights, and "
            f"reproducibility={exact} promises the same. Define its methods state and load_state, set "
            "launcher.max_restarts=0, or set reproducibility=seeded."
        )


def check_resumes(recipe: Recipe, step: int, *, exact: str | None) -> None:
    """Warn if a run resumes after ``step`` without values that its recipe has kept, or raise ConfigError if ``exact``.

    ``exact``: the reproducibility mode if it promises bits.
    """
    if not recipe.remembers or saves_state(recipe) or step == 0:
        return
    kind = type(recipe).__name__
    fact = f"{kind} keeps values from step to step (remembers = True), and the checkpoint of step {step} lacks them"
    if exact:
        raise ConfigError(
            f"{fact}: the run would train other weights, and reproducibility={exact} promises the same. Define its "
            "methods state and load_state and train it again, or set reproducibility=seeded."
        )
    _logger.warning("%s: it begins anew. Define its methods state and load_state.", fact)
