"""Compiles the forward and backward passes of a model with torch.compile, and reports what was compiled."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from worldsize.core import ConfigError, Numerics, Recipe
from worldsize.world.scratch import keep_compiled_code

_logger = logging.getLogger(__name__)

_KEPT = 10_000  # compilations that torch remembers


def compile_passes(recipe: Recipe, model: nn.Module, numerics: Numerics) -> None:
    """Let torch compile the forward pass of each block that ``recipe`` names, or else of the whole ``model``.

    Parameters, buffers and hooks stay those of ``model``, so wrappers, checkpoints and shards do not notice. Each pass
    is compiled when it is first called, and again for inputs of another shape.

    Under deterministic algorithms each shape is compiled by itself. Otherwise torch would generalize a pass when it
    meets a second shape, and the code of a step would depend on the shapes before it, which a resumed run has not met.
    For the same reason more shapes than torch keeps are an error there, and not a silent return to eager execution.
    """
    import torch._dynamo  # takes seconds, for which only compiled runs wait
    import torch._inductor.config

    keep_compiled_code()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it misses CUDA on machines without
    torch._dynamo.utils.set_compilation_metrics_limit(_KEPT)
    exact = torch.are_deterministic_algorithms_enabled()
    if exact:
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._inductor.config.deterministic = True  # no choice by timing
    for module in list(recipe.blocks(model)) or [model]:
        forward = torch.compile(module.forward, mode=numerics.compile_mode, dynamic=False if exact else None)
        module.forward = forward  # not a wrapper, whose name would be in checkpoints


def refuse_graphs(numerics: Numerics, *, strategy: str) -> None:
    """Raise ConfigError if passes are to be recorded as CUDA graphs by a ``strategy`` that gathers parameters."""
    if numerics.records_graphs:
        raise ConfigError(
            f"compile_mode={numerics.compile_mode} records CUDA graphs, whose memory stays where it is, and {strategy} "
            "gathers parameters anew in each pass. Set compile_mode=default."
        )


@final
@dataclass
class Compilations:
    """Counts what torch has compiled in this process."""

    _reported: int = 0

    def facts(self, *, speaks: bool) -> dict[str, Any]:
        """Return the number of graphs, their seconds and why any was compiled again; nothing if there is no new one.

        What was compiled again since the first call, before which everything is compiled once, is logged if this
        process ``speaks``.
        """
        made = _compilations()
        new, self._reported = made[self._reported :], len(made)
        if not new:
            return {}
        if speaks and len(new) < len(made):
            for each in filter(_is_repeated, new):
                _logger.info("compiled again, in %.1f s: %s", _seconds(each), _described(each))
        return {
            "graphs": len(made),
            "seconds": sum(map(_seconds, made)),
            "again": [_described(each) for each in made if _is_repeated(each)],
        }


COMPILATIONS = Compilations()
"""Those of this process since it began."""


def _is_repeated(made: Any) -> bool:
    return made.recompile_reason is not None


def _seconds(made: Any) -> float:
    return (made.duration_us or 0) / 1e6


def _described(made: Any) -> str:
    return f"{made.co_name} ({made.co_filename}, line {made.co_firstlineno}): {made.recompile_reason}"


def _compilations() -> list[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()
