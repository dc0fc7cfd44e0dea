"""How long samples are, said without a list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor


@final
class LookedUpLengths:
    """The lengths of the samples of a source, looked up where they are asked for.

    Args:
        look_up: returns the lengths of the samples with these numbers: whole numbers [numbers], of any type.
    """

    def __init__(self, look_up: Callable[[NDArray[numpy.int64]], NDArray[Any]]) -> None:
        self._look_up = look_up

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the lengths of the samples ``indices``, int64 [indices]."""
        return torch.from_numpy(self._look_up(indices.numpy()).astype(numpy.int64))
