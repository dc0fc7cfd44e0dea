"""The limits of this process's waits for training data."""

from __future__ import annotations

from worldsize.config.settings import Settings
from worldsize.core import World
from worldsize.data.data_wait import Patience
from worldsize.world.preemption import Preemption
from worldsize.world.stop_vote import StopVote


def patience_of(settings: Settings, world: World, preemption: Preemption) -> Patience:
    """Return the limits of a wait for data; members of a gang that heals have no store in which all could vote."""
    vote = None if settings.heals else StopVote(world)

    def stops(step: int) -> bool:
        return vote is not None and preemption.is_wanted() and vote.passes(step)

    return Patience(settings.cluster.timeout, speaks=world.rank == 0, stops=stops)
