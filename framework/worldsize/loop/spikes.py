"""Spikes of the loss or the gradient norm, as a pure function of the logged values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal, final

from worldsize.core.events import Spike
from worldsize.core.limits import LARGEST, Key, Range

LoggedValues = Sequence[tuple[int, float, float | None]]
"""Number, loss and gradient norm of logged steps, in order; None: the strategy does not compute the norm."""

_LEAST = 10  # minimum number of earlier finite values to compare with


@final
@dataclass(frozen=True)
class SpikeDetection:
    """A logged step is a spike if its loss or gradient norm exceeds ``factor`` times the median of the last ``window``.

    At least 10 earlier values are needed. The loss is not compared while its median is 0 or negative.

    Attributes:
        factor: How many times the median a value must exceed; null in the configuration: spikes are not detected.
        window: Number of earlier logged steps to compare with.
        on_spike: "warn" reports the spike and continues; "rewind" goes back to the last checkpoint before the spike,
            and continues without the samples of the steps since then.
        rewinds: Maximum number of rewinds in a run; the next spike ends the run.
    """

    factor: Annotated[float, Range(above=1), Key(default=None)]
    window: Annotated[int, Range(least=_LEAST), LARGEST] = 50
    on_spike: Literal["warn", "rewind"] = "warn"
    rewinds: Annotated[int, Range(least=0, hint="0 means that a spike ends the run"), LARGEST] = 3

    @property
    def is_rewinding(self) -> bool:
        """Whether the run goes back before a spike."""
        return self.on_spike == "rewind"

    def find_spike(self, logged: LoggedValues, *, nonfinite: Sequence[str] = ()) -> Spike | None:
        """Return the spike at the last of these logged steps, or None.

        Args:
            logged: The last ``window`` + 1 logged steps, or more.
            nonfinite: Values whose NaN or infinity is a spike: "loss", "grad_norm".
        """
        if not logged:
            return None
        *earlier, (step, loss, norm) = logged[-self.window - 1 :]
        since = earlier[-1][0] if earlier else 0
        losses, norms = [each[1] for each in earlier], [each[2] for each in earlier]
        for name, value, history in (("loss", loss, losses), ("grad_norm", norm, norms)):
            if value is None:
                continue
            finite = [each for each in history if each is not None and math.isfinite(each)]
            typical = median(finite) if len(finite) >= _LEAST else None
            is_above = typical is not None and typical > 0 and value > self.factor * typical
            if is_above if math.isfinite(value) else name in nonfinite:
                return Spike(step, name, value, typical, len(finite), since, self.on_spike)
        return None


class SpikeFoundError(Exception):
    """Ends the training loop on all ranks between two steps, so that the run goes back to before ``spike``."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.describe())
        self.spike = spike
