"""Print the public API as text; ``uv run python tests/api.py`` rewrites docs/api/public.md."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "api" / "public.md"
EVERYTHING = (
    "worldsize.api.custom_loop",
    "worldsize.api.run",
    "worldsize.api.train",
    "worldsize.core.cluster",
    "worldsize.core.context",
    "worldsize.core.evaluation",
    "worldsize.core.events",
    "worldsize.core.launcher",
    "worldsize.core.limits",
    "worldsize.core.recipe_kinds",
    "worldsize.core.numerics",
    "worldsize.core.recipe",
    "worldsize.core.state_metric",
    "worldsize.core.strategy",
    "worldsize.core.streams",
    "worldsize.errors",
    "worldsize.testing.contract",
    "worldsize.testing.hosts",
    "worldsize.testing.importing",
    "worldsize.testing.port",
    "worldsize.testing.recipes",
    "worldsize.testing.runs",
    "worldsize.testing.training",
    "worldsize.testing.worlds",
)
BLOCKS = {  # building blocks of strategies
    "worldsize.collectives.exact": ("reduce_metrics",),
    "worldsize.collectives.group": ("Collective", "receive", "send", "start_collective"),
    "worldsize.collectives.step_timer": ("measure_phase",),
    "worldsize.collectives.per_rank": ("local_row", "stack_per_rank"),
    "worldsize.observe.events": ("Alert", "alert_for"),
    "worldsize.seeds": ("keep_generators", "seed_generators"),
    "worldsize.metrics": ("TorchMetric", "WholeSplit"),
    "worldsize.strategies.gradient_reducer": ("GradientReducer", "Backward"),
    "worldsize.strategies.layer_streams": ("AdaptedLayer",),
    "worldsize.strategies.loss_record": ("LossRecord", "differentiable", "mean_loss", "step_metrics"),
    "worldsize.strategies.periodic": (
        "find_averaged_buffers",
        "find_trained_parameters",
        "OuterOptimizer",
        "PeriodicSyncStrategy",
    ),
    "worldsize.strategies.train_state": ("OptimizerPart", "TrainState"),
    "worldsize.testing.port_runs": ("PortConfig",),
    "worldsize.strategies.synchronous": ("create_local_replica", "SynchronousReplica"),
    "worldsize.strategies.model_replica": ("ModelReplica", "autocast", "collect_metrics"),
    "worldsize.world.environments": ("Placement",),
}
_HEAD = """# The public API

The names that plugins and recipes may rely on; [plugins.md](../plugins.md) shows their use. Written by
`uv run python tests/api.py`. Each change on this page has a line in the changelog.

```python
{listing}
```
"""


def listing() -> str:
    parts = [_module(name, sorted(_own_names(importlib.import_module(name)))) for name in EVERYTHING]
    return "\n\n".join([*parts, *(_module(name, names) for name, names in sorted(BLOCKS.items()))])


def page() -> str:
    return _HEAD.format(listing=listing())


def _own_names(module: Any) -> Iterator[str]:
    """Yield the names defined by the module itself; :func:`_aliases` lists aliases of types."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "main" and getattr(value, "__module__", None) == module.__name__:
            yield name


def _module(name: str, names: Any) -> str:
    module = importlib.import_module(name)
    aliases = [line for alias, line in _aliases(module) if name in EVERYTHING or alias in names]
    described = [line for defined in names for line in _lines(defined, getattr(module, defined))]
    return "\n".join([f"# {name}", *aliases, *described])


def _aliases(module: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of types and constants with their definitions, as the module's source has them."""
    for node in ast.parse(inspect.getsource(module)).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            yield target.id, ast.unparse(node)


def _lines(name: str, value: Any) -> Iterator[str]:
    if inspect.isfunction(value):
        yield f"def {name}{_signature(value)}"
    elif inspect.isclass(value):
        yield from _class(name, value)


def _class(name: str, value: type) -> Iterator[str]:
    bases = [base.__name__ for base in value.__bases__ if base is not object]
    yield f"class {name}{'(' + ', '.join(bases) + ')' if bases else ''}"
    if not issubclass(value, Exception | dict):  # a TypedDict is a dict described by its annotations
        yield f"    def __init__{_signature(value)}"
    for member, what in sorted(vars(value).items()):
        function = what.fget if isinstance(what, property) else getattr(what, "__func__", what)
        if not member.startswith("_") and inspect.isfunction(function):
            yield f"    {'property' if isinstance(what, property) else 'def'} {member}{_signature(function)}"
    for member, hint in sorted(vars(value).get("__annotations__", {}).items()):
        if not member.startswith("_") and not is_dataclass(value):  # a dataclass has its fields in the signature
            yield f"    {member}: {hint}"


def _signature(value: Any) -> str:
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.signature(value)).replace("'", ""))


if __name__ == "__main__":
    PAGE.write_text(page())
