"""torchao's 8-bit AdamW with plain tensors in its ``state_dict``, for checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

_INNER = ("codes", "scale")  # from __tensor_flatten__, without the constant lookup table
_SIGNED = ("exp_avg",)  # moments that may be negative


@final
class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]
    """torchao's AdamW with learning rates as floats, created by :func:`.eight_bit.adamw_8bit`.

    In its ``state_dict``, each 8-bit moment consists of two plain tensors: ``<name>.codes`` (uint8, of the parameter's
    shape) and ``<name>.scale`` (blocks,).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, ...] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        block_size: int = 256,
        compile: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, block_size=block_size)
        self.defaults.update(block_size=block_size, compile=compile)  # for copies of this optimizer
        self._compiles = compile

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)  # converts the rate to a tensor
        self.param_groups[-1]["lr"] = float(rate)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)  # a float would become a constant in the graph
        try:
            with self._stance():
                loss: float | None = super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss

    def _stance(self) -> AbstractContextManager[None]:
        """Return a context for a step, which may disable compilation.

        Compilation is disabled for meta tensors, or if ``compile`` is false.
        """
        is_meta = any(parameter.is_meta for group in self.param_groups for parameter in group["params"])
        if self._compiles and not is_meta:
            return nullcontext()
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")  # takes effect on construction
        return stance

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return {**state, "state": {key: _flatten_moments(values) for key, values in state["state"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = {key: _join_moments(values) for key, values in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


def _flatten_moments(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, OptimState8bit):
            flat |= {f"{name}.{inner}": getattr(value, inner) for inner in _INNER}
        else:
            flat[name] = value
    return flat


def _join_moments(values: Mapping[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, value in values.items():
        moment, _, inner = name.partition(".")
        if inner == "codes":
            scale = values[f"{moment}.scale"]
            made = OptimState8bit.zeros(
                value.shape, moment in _SIGNED, value.numel() // scale.numel(), value.device, dtype=torch.float32
            )
            made.codes.copy_(value)
            made.scale.copy_(scale)
            joined[moment] = made
        elif not inner:
            joined[name] = value
    return joined
