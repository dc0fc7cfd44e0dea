"""Tensors without memory or numbers, with which a rank of a model that does not fit here can be rehearsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from worldsize.collectives.per_rank import local
from worldsize.core import ConfigError, StateDict, Strategy


@final
class FakeTensors:
    """Lets what is made within :meth:`made` be tensors without memory or numbers; asked for one, they say 1."""

    def __init__(self) -> None:
        self.mode = _Mode(allow_non_fake_inputs=True)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Let tensors that are made within be fakes."""
        with self.mode, _Numbers():  # type: ignore[no-untyped-call]
            yield

    def check(self, state: StateDict, strategy: Strategy) -> None:
        """Refuse a model whose tensors are real, beside which there can be no fakes.

        Raises:
            ConfigError: ``strategy`` holds the model whole, or the recipe's constructor cannot be described.
        """
        tensors = [local(each) for each in state["model"].values() if isinstance(each, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors):  # a buffer may have been computed already
            raise ConfigError(
                f"{type(strategy).__name__} has made the model with real tensors. Leave --fake out, or choose a "
                "strategy that shards it, such as fsdp; what its constructor may do: docs/strategies.md."
            )

    def owns(self, tensor: FakeTensor) -> bool:
        """Return whether the rank has ``tensor``: it is not one of those by which DTensor finds out global shapes."""
        return tensor.fake_mode is self.mode and self.mode.depth < 2

    def of(self, data: Any) -> Any:
        """Return ``data`` with fakes in place of its tensors."""
        return apply_to_collection(data, Tensor, self.mode.from_tensor)


@final
class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that knows how often it is entered; DTensor enters that of its tensors once more."""

    depth = 0

    def __enter__(self) -> Self:
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        super().__exit__(*error)


@final
class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a program asks of a number that a fake tensor does not have: 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **kwargs or {})
