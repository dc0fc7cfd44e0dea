"""Muon for weight matrices of hidden layers and AdamW for the rest, as one optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, final

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from worldsize.core import Range
from worldsize.errors import ConfigError, neighbours
from worldsize.optimizers.arguments import check_tuples
from worldsize.optimizers.groups import (
    Group,
    check_patterns,
    embedding_weights,
    has_matching_name,
    normalize_groups,
    split_groups,
)

_Scale = Literal["original", "match_rms_adamw", "spectral_unclamped"]


def muon(
    parameters: Iterable[Any],
    lr: Annotated[float, Range(least=0)] = 1e-3,
    weight_decay: Annotated[float, Range(least=0)] = 0.1,
    momentum: Annotated[float, Range(least=0, most=1)] = 0.95,
    ns_steps: Annotated[int, Range(least=1, most=99)] = 5,
    adjust_lr_fn: Annotated[_Scale, ()] = "match_rms_adamw",
    adamw: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return torch's Muon for matrices, with AdamW for embeddings and all other tensors.

    Args:
        parameters: Parameters or parameter groups, as for torch's optimizers; groups keep their options.
        lr: Learning rate of both algorithms.
        weight_decay: Decoupled weight decay of both algorithms.
        momentum: Momentum of Muon.
        ns_steps: Newton-Schulz iterations per Muon update.
        adjust_lr_fn: Scaling of Muon updates; "match_rms_adamw" gives them the RMS of AdamW updates, so that both can
            share one learning rate (Liu et al. 2025, arXiv 2502.16982).
        adamw: Options for AdamW only, and ``match``, name patterns of matrices to update with AdamW as well, such as
            the output layer.

    Raises:
        ConfigError: a pattern has no matches, or an option in ``adamw`` is unknown or malformed.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    own = dict(adamw or {})
    patterns = own.pop("match", ())
    given, names = normalize_groups(parameters)
    check_patterns(patterns, names, key="optimizer.adamw.match")
    _check_adamw_options(own)
    options: Mapping[str, Group] = {
        "muon": {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        },
        "adamw": {"lr": lr, "weight_decay": weight_decay, **own},
    }
    embeddings = embedding_weights()

    def choose_algorithm(parameter: Tensor) -> str:
        is_hidden = parameter.ndim == 2 and id(parameter) not in embeddings
        return "muon" if is_hidden and not has_matching_name(parameter, patterns, names) else "adamw"

    parts = split_groups(given, choose_algorithm, [*options])
    return MuonAdamW(_build_group(algorithm, {**options[algorithm], **part}) for algorithm, part in parts)


def _check_adamw_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _KNOWN["adamw"]:
            raise ConfigError(f"unknown key 'optimizer.adamw.{name}'{neighbours(name, [*_KNOWN['adamw'], 'match'])}")
    check_tuples(AdamW, options, key="optimizer.adamw")


def _build_group(algorithm: str, options: Group) -> Group:
    """Return a group with exactly the options of ``algorithm``, validated by torch."""
    own = {name: value for name, value in options.items() if name in _KNOWN[algorithm]}
    return {**_KINDS[algorithm](options["params"], **own).param_groups[0], "algorithm": algorithm}


_KINDS: Mapping[str, Callable[..., Optimizer]] = {"muon": torch.optim.Muon, "adamw": AdamW}
_KNOWN = {name: inspect.signature(kind).parameters.keys() - {"params"} for name, kind in _KINDS.items()}


@final
class MuonAdamW(Optimizer):
    """Optimizer with one algorithm per group, created by :func:`muon`.

    Args:
        params: Groups with the key ``algorithm`` ("muon" or "adamw") and all options of that algorithm.
    """

    def __init__(self, params: Iterable[Group]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with both algorithms."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state  # load_state_dict replaces it
            part.step()
        return loss

    @cached_property  # not in the constructor: copying or loading an optimizer bypasses it
    def _parts(self) -> Mapping[str, Optimizer]:
        """Torch's Muon and AdamW, which step on this optimizer's groups and state."""
        return {algorithm: kind([torch.zeros(1, 1)]) for algorithm, kind in _KINDS.items()}


def needs_matrices(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` needs full matrices and cannot update shards separately."""
    return isinstance(optimizer, MuonAdamW | torch.optim.Muon)
