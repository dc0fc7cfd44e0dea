"""The protocol of workers and servers: operations of its own, beside those that every protocol has."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Operation(IntEnum):
    """Requests and answers. Messages are JSON; each request gets one answer unless it says otherwise."""

    PUSH = 32  # a gradient of one bucket; answered by DONE, all pushes of a step in their order
    PULL = 33  # answered by WEIGHTS, once for each bucket
    WEIGHTS = 34
    PUSH_ROWS = 35  # ids as below, then gradients (float32) of rows of one table; answered by DONE
    PULL_ROWS = 36  # ids (int64), sorted and each once; answered by WEIGHTS of shape [rows, dim]
    TICK = 37  # message: what the worker has finished; answered by TASK when there is one
    TASK = 38  # message
    NORMS = 39  # answered by a MESSAGE once the step's gradients have all come
    APPLY = 40  # message: the step, and the factor of its gradient; answered by DONE
    STATE = 41  # answered by DONE once the state is copied, then by TREE
    TREE = 42  # JSON and tensors, see worldsize.strategies.parameter_server.state_transfer
    STOP = 43  # message, to a server: the run ends; answered by DONE
    RESET = 44  # message: the step that is done; what has come of later ones is dropped; answered by DONE
    FACTS = 45  # answered by a MESSAGE
    WEIGH = 46  # message: the step, and what its mean gradient is multiplied by before NORMS; answered by DONE
    BEGIN = 47  # message: a step with several updates, which begins; answered by DONE
    ROLL_BACK = 48  # message: the number of updates to count from there, where that step began; answered by DONE


class Fields(NamedTuple):
    """Meanings of the seven numbers in a frame's header.

    Attributes:
        table: The bucket or the table that the payload belongs to.
        width: With ``node``, the part of the tree over logical ranks that a gradient is the sum of.
        node: See ``width``.
        seen: Updates in the weights that a gradient was computed with, or that these weights have seen, modulo 2^32.
        epoch: Counts how often the worker that pushes has joined the run.
        sequence: Counts the worker's pushes of an epoch.
        step: The step that a gradient is of, or whose updates weights have seen.
    """

    table: int = 0
    width: int = 0
    node: int = 0
    seen: int = 0
    epoch: int = 0
    sequence: int = 0
    step: int = 0


def shard_service(shard: int) -> str:
    """Name the service of a shard, by which the run's registry knows it."""
    return f"shard {shard}"
