"""Compilation of a model with torch.compile, and statistics of the compilations."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from worldsize.core import ConfigError, Numerics, Recipe
from worldsize.world.scratch import keep_compiled_code

_logger = logging.getLogger(__name__)

_KEPT = 10_000  # number of compilations in torch's history


def compile_passes(recipe: Recipe, model: nn.Module, numerics: Numerics) -> None:
    """Compile the forward pass of each of ``recipe``'s blocks, or of the whole ``model``.

    Parameters, buffers and hooks still belong to ``model``, so wrappers, checkpoints and shards are unaffected. Each
    pass is compiled on its first call, and again for inputs of a different shape.

    With deterministic algorithms, each shape is compiled separately. Otherwise torch would generalize a pass at its
    second shape, and the code of a step would depend on earlier shapes, which differ in a resumed run. For the same
    reason, exceeding torch's recompile limit is then an error instead of a silent fallback to eager execution.
    """
    import torch._dynamo  # takes seconds to import; only compiled runs need it
    import torch._inductor.config

    keep_compiled_code()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns about missing CUDA
    torch._dynamo.utils.set_compilation_metrics_limit(_KEPT)
    exact = torch.are_deterministic_algorithms_enabled()
    if exact:
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._inductor.config.deterministic = True  # no autotuning
    for module in list(recipe.blocks(model)) or [model]:
        forward = torch.compile(module.forward, mode=numerics.compile_mode, dynamic=False if exact else None)
        module.forward = forward  # a wrapper module would change names in checkpoints


def refuse_graphs(numerics: Numerics, *, strategy: str) -> None:
    """Raise ConfigError if a ``strategy`` that gathers parameters would record CUDA graphs."""
    if numerics.records_graphs:
        raise ConfigError(
            f"compile_mode={numerics.compile_mode} is not supported with {strategy}: CUDA graphs require fixed "
            "addresses, but each pass gathers parameters into new memory. Set compile_mode=default."
        )


@final
@dataclass
class Compilations:
    """Tracks torch's compilations in this process."""

    _reported: int = 0

    def collect_statistics(self, *, speaks: bool) -> dict[str, Any]:
        """Return the graph count, total seconds and recompilation reasons; empty if unchanged.

        Recompilations after the first report, which covers the initial compilation, are logged if ``speaks``.
        """
        made = _compilations()
        new, self._reported = made[self._reported :], len(made)
        if not new:
            return {}
        if speaks and len(new) < len(made):
            for each in filter(_is_repeated, new):
                _logger.info("recompiled in %.1f s: %s", _get_duration(each), _format_recompilation(each))
        return {
            "graphs": len(made),
            "seconds": sum(map(_get_duration, made)),
            "again": [_format_recompilation(each) for each in made if _is_repeated(each)],
        }


COMPILATIONS = Compilations()
"""Compilations of this process since it started."""


def _is_repeated(made: Any) -> bool:
    return made.recompile_reason is not None


def _get_duration(made: Any) -> float:
    return (made.duration_us or 0) / 1e6


def _format_recompilation(made: Any) -> str:
    return f"{made.co_name} ({made.co_filename}, line {made.co_firstlineno}): {made.recompile_reason}"


def _compilations() -> list[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()
