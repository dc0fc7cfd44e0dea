"""Muon for the matrices of hidden layers, and AdamW for everything else, as one optimizer."""

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
from worldsize.optimizers.groups import Group, check_patterns, divided, embedding_weights, groups_of, matches

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
    """Return torch's Muon for matrices, with AdamW for embeddings and for what has another number of dimensions.

    Args:
        parameters: What torch's optimizers take; groups keep their options.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        momentum: Momentum of Muon.
        ns_steps: Newton-Schulz iterations of an update of Muon.
        adjust_lr_fn: Scale of an update of Muon; with "match_rms_adamw" it is as large as one of AdamW, so that both
            may have one learning rate (Liu et al. 2025, arXiv 2502.16982).
        adamw: Options of AdamW in place of those of both, and ``match``, patterns of matrices that it also updates,
            such as the output layer.

    Raises:
        ConfigError: a pattern matches nothing, or AdamW lacks an option.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    own = dict(adamw or {})
    patterns = own.pop("match", ())
    given, names = groups_of(parameters)
    check_patterns(patterns, names, key="optimizer.adamw.match")
    _check(own)
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

    def algorithm_of(parameter: Tensor) -> str:
        is_hidden = parameter.ndim == 2 and id(parameter) not in embeddings
        return "muon" if is_hidden and not matches(parameter, patterns, names) else "adamw"

    parts = divided(given, algorithm_of, [*options])
    return MuonAdamW(_group(algorithm, {**options[algorithm], **part}) for algorithm, part in parts)


def _check(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _KNOWN["adamw"]:
            raise ConfigError(f"no key 'optimizer.adamw.{name}'{neighbours(name, [*_KNOWN['adamw'], 'match'])}")
    check_tuples(AdamW, options, key="optimizer.adamw")


def _group(algorithm: str, options: Group) -> Group:
    """Return a complete group, whose options torch's constructor has checked; those of the other kind are left out."""
    own = {name: value for name, value in options.items() if name in _KNOWN[algorithm]}
    return {**_KINDS[algorithm](options["params"], **own).param_groups[0], "algorithm": algorithm}


_KINDS: Mapping[str, Callable[..., Optimizer]] = {"muon": torch.optim.Muon, "adamw": AdamW}
_KNOWN = {name: inspect.signature(kind).parameters.keys() - {"params"} for name, kind in _KINDS.items()}


@final
class MuonAdamW(Optimizer):
    """Updates each group by the algorithm that it names; made by :func:`muon`.

    Args:
        params: Groups with ``algorithm``, "muon" or "adamw", and all options of that.
    """

    def __init__(self, params: Iterable[Group]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state  # which is another one after a load
            part.step()
        return loss

    @cached_property  # not made by the constructor: whoever copies or loads an optimizer calls none
    def _parts(self) -> Mapping[str, Optimizer]:
        """The two of torch, which take steps for this optimizer with its groups and its state."""
        return {algorithm: kind([torch.zeros(1, 1)]) for algorithm, kind in _KINDS.items()}


def needs_matrices(optimizer: Optimizer) -> bool:
    """Return whether an update of a matrix needs all of it, so that shards cannot be updated by themselves."""
    return isinstance(optimizer, MuonAdamW | torch.optim.Muon)
