"""worldsize: run the same PyTorch training program at any world size.

The public names are imported on first use, since most of them import torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from worldsize import moved

if TYPE_CHECKING:
    from worldsize.api.custom_loop import (
        LoopRecipe,
        average_loss,
        compute_digest,
        evaluate,
        local_logical_ranks,
        micro_batches,
        open_world,
        restore,
        sample_batches,
        save,
    )
    from worldsize.api.run import Run, load, report
    from worldsize.api.train import compose, train
    from worldsize.core import (
        Cluster,
        Event,
        FeatureRecipe,
        Features,
        Launcher,
        Listener,
        MultiUpdateRecipe,
        Numerics,
        Recipe,
        Replica,
        RunContext,
        Strategy,
        Update,
        World,
    )
    from worldsize.errors import ConfigError, RunFailedError, WorldsizeError
    from worldsize.strategies.ddp import DDP
    from worldsize.strategies.fsdp import FSDP
    from worldsize.strategies.single import Single
    from worldsize.strategies.zero import ZeRO

_NAMES = {  # public names by the module that defines them
    "worldsize.api.custom_loop": "LoopRecipe average_loss compute_digest evaluate local_logical_ranks micro_batches "
    "open_world restore sample_batches save",
    "worldsize.api.run": "Run load report",
    "worldsize.api.train": "compose train",
    "worldsize.core": "Cluster Event FeatureRecipe Features Launcher Listener MultiUpdateRecipe Numerics Recipe "
    "Replica RunContext Strategy Update World",
    "worldsize.errors": "ConfigError RunFailedError WorldsizeError",
    "worldsize.strategies.ddp": "DDP",
    "worldsize.strategies.fsdp": "FSDP",
    "worldsize.strategies.single": "Single",
    "worldsize.strategies.zero": "ZeRO",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

# Make torch.cuda.is_available() query NVML instead of the driver, so that processes forked later can still use CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

__version__ = "0.1.0"
__all__ = [
    "DDP",
    "FSDP",
    "Cluster",
    "ConfigError",
    "Event",
    "FeatureRecipe",
    "Features",
    "Launcher",
    "Listener",
    "LoopRecipe",
    "MultiUpdateRecipe",
    "Numerics",
    "Recipe",
    "Replica",
    "Run",
    "RunContext",
    "RunFailedError",
    "Single",
    "Strategy",
    "Update",
    "World",
    "WorldsizeError",
    "ZeRO",
    "average_loss",
    "compose",
    "compute_digest",
    "evaluate",
    "load",
    "local_logical_ranks",
    "micro_batches",
    "open_world",
    "report",
    "restore",
    "sample_batches",
    "save",
    "train",
]

moved.register()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'worldsize' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
