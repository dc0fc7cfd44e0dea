"""Finds optimizers that cannot train an embedding with sparse gradients, or not so that a checkpoint can hold them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import Cluster, ConfigError
from worldsize.devices import backend_for
from worldsize.strategies.wrapping import sparse_embeddings
from worldsize.world.fork import gpus_hidden


def check_sparse_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Let optimizers like this one step once with a sparse gradient, for each group with an embedding of that kind.

    Raises:
        ConfigError: it takes none, or it keeps a sparse state, which no checkpoint takes.
    """
    names = {id(embedding.weight): name for name, embedding in sparse_embeddings(model).items()}
    for group in optimizer.param_groups:
        for name in [names[id(parameter)] for parameter in group["params"] if id(parameter) in names][:1]:
            _check_group(optimizer, group, name)


def refuse_sparse_sums(model: nn.Module, cluster: Cluster) -> None:
    """Raise ConfigError if ``model`` has sparse gradients, and processes of ``cluster`` would sum them by NCCL."""
    if cluster.processes > 1 and backend_for(cluster.backend, cluster.device) == "nccl":
        for name in sparse_embeddings(model):
            raise ConfigError(
                f"{name} has sparse=True, and NCCL sums no sparse gradients. Set sparse=False, cluster.backend=gloo, "
                "or a strategy whose servers keep rows, such as parameter_server."
            )


def _check_group(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> None:
    kind = type(optimizer).__name__
    try:
        state = _state_after_step(type(optimizer), group)
    except RuntimeError as error:
        raise ConfigError(
            f"{name} has sparse=True, and {kind} as it is set takes no sparse gradient ({error}). Set sparse=False; or "
            "use SparseAdam, Adagrad or SGD without momentum and weight decay; or a strategy whose servers keep rows, "
            "such as parameter_server."
        ) from None
    for key in state:
        raise ConfigError(
            f"{name} has sparse=True, and {kind} as it is set keeps a sparse {key} for it, which no checkpoint takes. "
            "Set momentum=0, use SparseAdam or Adagrad, or set sparse=False."
        )


def _state_after_step(kind: type[Optimizer], group: Mapping[str, Any]) -> list[str]:
    """Return the names of what is sparse in the state of an optimizer with the options of ``group`` after one step."""
    taken = inspect.signature(kind).parameters
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some make sparse tensors that nobody checks
        rows = nn.Parameter(torch.zeros(2, 1))
        rows.grad = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), (2, 1))
        try:
            made = kind([rows], **{key: value for key, value in group.items() if key in taken and key != "params"})
        except Exception:  # a class of one's own, that is made in another way
            return []
        with gpus_hidden():
            made.step()
    state = made.state.get(rows, {})
    return [key for key, value in state.items() if isinstance(value, Tensor) and value.layout != torch.strided]
