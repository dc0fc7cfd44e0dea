"""Facts about losses on which all ranks agree before their gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.core import World
from worldsize.dist.exact import start_all_gather
from worldsize.strategies.loss_record import LossRecord, forms_differ
from worldsize.strategies.loss_weights import fp16_share


@final
class AgreedLosses:
    """Exchanges facts about losses with the other ranks of ``world``; None: this rank's gradients are summed alone."""

    def __init__(self, world: World | None) -> None:
        self._world = world
        self._forms: dict[tuple[str, ...], bool] = {}  # whether losses are weighted, by the update
        self._share: Tensor | None = None  # scale of a summed loss in float16, agreed on for each gradient

    @property
    def group(self) -> ProcessGroup | None:
        """The group of the ranks whose gradients are summed; None: this rank alone."""
        return self._world.group if self._world else None

    def check_form(self, record: LossRecord, update: Sequence[str] = ()) -> None:
        """Refuse losses that are means on some ranks and weighted sums on others, which would wait for each other.

        All ranks exchange the form at the first ``update`` of these optimizers; it must then stay the same.

        Raises:
            ConfigError: the form differs between ranks, or from that of an earlier step.
        """
        key = (*update,)
        if key not in self._forms:
            self._exchange(record)
            self._forms[key] = record.is_weighted
        elif record.is_weighted != self._forms[key]:
            means, sums = ("before", "in this step") if record.is_weighted else ("in this step", "before")
            raise forms_differ(means, sums)

    def _exchange(self, record: LossRecord) -> None:
        if self._world is None:
            return
        forms = start_all_gather(torch.tensor([int(record.is_weighted)]), self._world)().flatten().tolist()
        if len({*forms}) > 1:
            raise forms_differ(f"on rank {forms.index(0)}", f"on rank {forms.index(1)}")

    def fp16_share(self, weight: Tensor) -> Tensor:
        """Return the scale, a scalar, of summed losses in float16 until the gradient is weighed."""
        if self._share is None:
            self._share = fp16_share(weight, self.group)
        return self._share

    def take_share(self) -> Tensor | None:
        """Return the scale, a scalar, of the gradient that is weighed now, and forget it; None: it was not scaled."""
        share, self._share = self._share, None
        return share
