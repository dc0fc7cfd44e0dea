"""The protocol of workers and servers: its operations, in addition to the common ones."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Operation(IntEnum):
    """Requests and answers. Messages are JSON; each request gets one answer unless noted otherwise."""

    PUSH = 32  # a gradient of one bucket; answered by DONE, all pushes of a step in their order
    PULL = 33  # answered by WEIGHTS, once for each bucket
    WEIGHTS = 34
    PUSH_ROWS = 35  # ids as below, then gradients (float32) of rows of one table; answered by DONE
    PULL_ROWS = 36  # unique sorted ids (int64); answered by WEIGHTS of shape (rows, dim)
    TICK = 37  # message: the task that the worker finished; answered by TASK when there is one
    TASK = 38  # message
    NORMS = 39  # answered by a MESSAGE once all gradients of the step have arrived
    APPLY = 40  # message: the step, and the factor of its gradient; answered by DONE
    STATE = 41  # answered by DONE once the state is copied, then by TREE
    TREE = 42  # JSON and tensors, see worldsize.strategies.parameter_server.state_transfer
    STOP = 43  # message, to a server: the run ends; answered by DONE
    RESET = 44  # message: the last completed step; gradients of later ones are dropped; answered by DONE
    FACTS = 45  # answered by a MESSAGE
    WEIGH = 46  # message: the step, and a factor for its mean gradient before NORMS; answered by DONE
    BEGIN = 47  # message: a step with several updates begins; answered by DONE
    ROLL_BACK = 48  # message: the number of updates to count on from at the step's start; answered by DONE
    ADVANCE = 49  # message: the value of a metric, and the step after which it was evaluated; answered by DONE


class Fields(NamedTuple):
    """Meanings of the seven numbers in a frame's header.

    Attributes:
        table: The bucket or the table to which the payload belongs.
        width: Number of nodes of a level of the tree over logical ranks; see ``node``.
        node: Index of the node, in the level with ``width`` nodes, whose sum the gradient is.
        seen: Number of updates, modulo 2^32, in the weights with which a gradient was computed, or in pulled weights.
        epoch: Number of times that the pushing worker has joined the run.
        sequence: Number of the worker's push in its epoch.
        step: The step of a gradient, or the last step whose updates weights include.
    """

    table: int = 0
    width: int = 0
    node: int = 0
    seen: int = 0
    epoch: int = 0
    sequence: int = 0
    step: int = 0


def shard_service(shard: int) -> str:
    """Return the name of a shard's service in the run's registry."""
    return f"shard {shard}"
