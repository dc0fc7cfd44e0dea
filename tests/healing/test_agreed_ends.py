"""Members of a new membership agree on whether the evaluation after their newest step is done."""

from __future__ import annotations

import pytest

from worldsize.core import World
from worldsize.healing.loop import agree_on_ends
from worldsize.loop.fit import TrainingProgress
from worldsize.testing.worlds import run_in_worlds

DONE, BEFORE, OTHER = TrainingProgress(8), TrainingProgress(8, evaluated=False, saved=False), TrainingProgress(7)


@pytest.mark.parametrize(
    ("known", "has_logged", "expected"),
    [
        ((DONE, DONE, DONE), True, (True, True)),
        ((DONE, BEFORE, DONE), True, (False, True)),
        ((DONE, None, OTHER), True, (True, True)),
        ((DONE, DONE, DONE), False, (False, False)),
        ((OTHER, DONE, DONE), True, (False, False)),
    ],
    ids=["all know it", "one was cut off", "two join", "the first one did not log", "the first one joins"],
)
def test_an_evaluation_is_done_if_all_that_completed_the_step_completed_it(
    known: tuple[TrainingProgress | None, ...], has_logged: bool, expected: tuple[bool, bool]
) -> None:
    def body(world: World) -> tuple[bool, bool]:
        return agree_on_ends(8, world, known[world.rank], has_logged=has_logged)

    assert run_in_worlds(body, 3) == [expected] * 3
