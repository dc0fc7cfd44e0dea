"""Old module names, accepted for one more release in recorded runs and (with a warning) in plugins."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED: Mapping[str, str] = {  # old module name to new name
    "worldsize.checkpoints": "worldsize.checkpoint",
    "worldsize.checkpoints.format": "worldsize.checkpoint.format",
    "worldsize.checkpoints.load": "worldsize.checkpoint.load",
    "worldsize.checkpoints.retention": "worldsize.checkpoint.format",
    "worldsize.checkpoints.save": "worldsize.checkpoint.save",
    "worldsize.collectives.codecs": "worldsize.collectives.reductions",
    "worldsize.collectives.gathered": "worldsize.collectives.ordered",
    "worldsize.core.image": "worldsize.core.cluster",
    "worldsize.core.multi_update": "worldsize.core.recipe_kinds",
    "worldsize.cost": "worldsize.collectives.cost",
    "worldsize.cost.cluster": "worldsize.collectives.cluster_cost",
    "worldsize.data.fetch": "worldsize.data.batches",
    "worldsize.data.packing": "worldsize.data.sources.documents",
    "worldsize.data.sources.hf_datasets": "worldsize.data.sources.arrow",
    "worldsize.data.sources.parquet": "worldsize.data.sources.arrow",
    "worldsize.engine": "worldsize.loop",
    "worldsize.engine.chained": "worldsize.loop.schedules",
    "worldsize.engine.faults": "worldsize.loop.faults",
    "worldsize.engine.schedules": "worldsize.loop.schedules",
    "worldsize.launch.autoscale_policies": "worldsize.launch.autoscale",
    "worldsize.metrics.concatenated": "worldsize.metrics",
    "worldsize.metrics.torchmetrics": "worldsize.metrics",
    "worldsize.records": "worldsize.record",
    "worldsize.records.run_directory": "worldsize.record.run_directory",
    "worldsize.reproducibility": "worldsize.record",
    "worldsize.reproducibility.determinism": "worldsize.record.determinism",
    "worldsize.reproducibility.seeds": "worldsize.record.determinism",
    "worldsize.strategies.all_reduce_reducer": "worldsize.strategies.ddp_reducers",
    "worldsize.strategies.alone": "worldsize.strategies.synchronous",
    "worldsize.strategies.multi_train_state": "worldsize.strategies.train_state",
    "worldsize.strategies.parameter_server": "plugins.parameter_server",
    "worldsize.strategies.parameter_server.hybrid": "plugins.parameter_server.hybrid",
    "worldsize.strategies.parameter_server.strategy": "plugins.parameter_server.strategy",
    "worldsize.strategies.periodic.cost": "worldsize.strategies.periodic",
    "worldsize.strategies.periodic.exchange": "worldsize.strategies.periodic_exchange",
    "worldsize.strategies.periodic.fragment": "worldsize.strategies.periodic_exchange",
    "worldsize.strategies.periodic.parameters": "worldsize.strategies.periodic",
    "worldsize.strategies.periodic.replica": "worldsize.strategies.periodic",
    "worldsize.strategies.periodic.rounds": "worldsize.strategies.periodic",
    "worldsize.strategies.periodic.strategy": "worldsize.strategies.periodic",
    "worldsize.testing.leaks": "worldsize.testing.runs",
    "worldsize.train": "worldsize.loop",
    "worldsize.train.faults": "worldsize.loop.faults",
    "worldsize.train.schedules": "worldsize.loop.schedules",
    "worldsize.transport": "worldsize.net",
    "worldsize.transport.certificates": "worldsize.net.credentials",
    "worldsize.transport.channel": "worldsize.net.channel",
    "worldsize.transport.connection_server": "worldsize.net.endpoints",
    "worldsize.transport.dialer": "worldsize.net.registry",
    "worldsize.transport.endpoints": "worldsize.net.endpoints",
    "worldsize.transport.frames": "worldsize.net.frames",
    "worldsize.transport.refusals": "worldsize.net.agent_connection",
    "worldsize.transport.registry": "worldsize.net.registry",
    "worldsize.transport.shared_memory": "worldsize.net.frames",
}

RENAMED: Mapping[str, str] = {  # old name to new name, for objects in modules that still exist
    "worldsize.collectives.step_timer.started": "worldsize.collectives.group.Collective",
    "worldsize.collectives.step_timer.wait": "worldsize.collectives.group.wait",
    "worldsize.metrics.Concatenated": "worldsize.metrics.WholeSplit",
    "worldsize.record.determinism.GeneratorStates": "worldsize.seeds.GeneratorStates",
    "worldsize.record.determinism.STREAMS": "worldsize.seeds.STREAMS",
    "worldsize.record.determinism.drawn_apart": "worldsize.seeds.draw_from",
    "worldsize.record.determinism.generators_kept": "worldsize.seeds.keep_generators",
    "worldsize.record.determinism.seed_generators": "worldsize.seeds.seed_generators",
    "worldsize.record.determinism.stream": "worldsize.seeds.derive_seed",
    "worldsize.strategies.train_state.MultiTrainState": "worldsize.strategies.train_state.TrainState",
    "worldsize.strategies.train_state.OptimizedModel": "worldsize.strategies.train_state.TrainState",
    "worldsize.testing.runs.Run": "worldsize.testing.runs.CompletedRun",
}


def resolve_renamed(module: str, name: str) -> Any:
    """Return the object formerly called ``name`` in ``module``, with a warning; for a module's ``__getattr__``.

    Raises:
        AttributeError: ``module`` never had this name.
    """
    path = RENAMED.get(f"{module}.{name}")
    if path is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} has been renamed to {path.removeprefix(f'{module}.')}.", FutureWarning, stacklevel=3
    )
    home, _, now = path.rpartition(".")
    return getattr(importlib.import_module(home), now)


def find_current_name(path: str) -> str:
    """Return the current name of ``path``, a module or an object in a module."""
    module = path
    while module.startswith("worldsize."):
        if module in MOVED:
            return MOVED[module] + path.removeprefix(module)
        module = module.rpartition(".")[0]
    return path


def rename_targets(node: Any) -> None:
    """Replace old names of ``_target_`` in ``node``, nested dicts and lists, with current names, in place."""
    if isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            node["_target_"] = find_current_name(target)
        node = list(node.values())
    for each in node if isinstance(node, list) else ():
        rename_targets(each)


class _Moved(ModuleType):
    """Placeholder for a moved module; forwards attributes to the new module.

    ``from worldsize.engine.faults import NAME`` works, as do ``import ... as`` and ``importlib.import_module``.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.__spec__ = ModuleSpec(path, loader=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by code that walks sys.modules
            raise AttributeError(name)
        module = MOVED[self.__name__]
        value = getattr(importlib.import_module(module), name)
        warnings.warn(f"{self.__name__} has moved. Import {name} from {module}.", FutureWarning, stacklevel=2)
        return value


def register() -> None:
    """Make the old module names importable; the new module is imported when the old name is first used."""
    for path in MOVED:
        sys.modules.setdefault(path, _Moved(path))
