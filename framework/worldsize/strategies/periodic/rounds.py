"""Schedules the exchange of fragments: all at once, or one after the other in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, final

from worldsize.core import Range, StateDict
from worldsize.strategies.periodic.fragment import Fragment
from worldsize.strategies.periodic.replica import OuterOptimizer

# learning rate of Nesterov SGD with outer gradients
OuterRate = Annotated[float, Range(above=0, hint="0.7 is usual, 1 with no momentum averages")]
OuterMomentum = Annotated[float, Range(least=0, below=1, hint="0.9 is usual")]


@final
class Rounds(OuterOptimizer):
    """Exchanges fragments in turn, each once in ``inner_steps`` steps.

    Fragment i is sent after the steps ``offsets[i] + n × inner_steps``; the result is applied ``delay`` steps later.
    The second half of the exchange starts after half of the delay.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        offsets: Sequence[int],
        *,
        inner_steps: int,
        delay: int = 0,
        mix: float = 0.0,
    ) -> None:
        self._fragments, self._offsets = list(fragments), list(offsets)
        self._inner_steps, self._delay, self._mix = inner_steps, delay, mix

    def after(self, step: int) -> None:
        for fragment in self._due(step):
            self.sent_bytes += fragment.send()
        for fragment in self._due(step - -(-self._delay // 2)):
            fragment.relay()
        for fragment in self._due(step - self._delay):
            fragment.apply(self._mix)

    def _due(self, step: int) -> list[Fragment]:
        """Return the fragments that are sent after ``step``."""
        pairs = zip(self._fragments, self._offsets, strict=True)
        return [fragment for fragment, offset in pairs if (step - offset) % self._inner_steps == 0]

    def restart(self) -> None:
        for fragment in self._fragments:
            fragment.restart()

    def state(self) -> StateDict:
        return {"fragments": [fragment.state(in_flight=self._delay > 0) for fragment in self._fragments]}

    def load(self, state: StateDict) -> None:
        for fragment, kept in zip(self._fragments, state["fragments"], strict=True):
            fragment.load(kept)
