"""The service of a server for the leading process: commits, copies of its state, and the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from worldsize.net.channel import Channel
from worldsize.net.frames import CommonOperation, Header, RefusedError
from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strategies.parameter_server.shard_master import ShardMaster
from worldsize.strategies.parameter_server.state_transfer import send_tree
from worldsize.strategies.parameter_server.step_start import StepStart


@final
class LeaderService:
    """Serves the process that leads the run.

    Args:
        master: Changes and reads the shard.
        start: Saves the state at the start of a step with several updates.
        facts: Returns the server's load since the last call.
        leader_prefix: The beginning of the names of processes that may lead, such as "server-".
    """

    def __init__(
        self, master: ShardMaster, start: StepStart, facts: Callable[[], Mapping[str, Any]], *, leader_prefix: str
    ) -> None:
        self._master, self._start = master, start
        self._facts, self._leader_prefix = facts, leader_prefix

    def serve(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Serve one connection until it ends. Raises LostError or RefusedError."""
        name = str(facts["name"])
        if not name.startswith(self._leader_prefix):
            raise RefusedError(f"{name} does not lead this run")
        channel.send_message(CommonOperation.WELCOME, {"step": self._master.shard.step})
        while True:
            self._answer(channel, channel.header(), name)

    def _answer(self, channel: Channel, header: Header, name: str) -> None:
        match header.operation:
            case Operation.NORMS:
                channel.send_message(CommonOperation.MESSAGE, self._master.norms())
            case Operation.APPLY:
                self._master.apply(**channel.message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.WEIGH:
                self._master.weigh(**channel.message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.ADVANCE:
                self._master.advance(**channel.message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.RESET:
                self._master.reset(**channel.message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.BEGIN:
                self._start.keep(**channel.message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.ROLL_BACK:
                self._start.roll_back(**channel.message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.FACTS:
                channel.send_message(CommonOperation.MESSAGE, self._facts())
            case Operation.STATE:
                state = self._master.state()
                channel.send(Header(CommonOperation.DONE))  # the state is copied, and the shard may change again
                send_tree(channel, state)
            case Operation.STOP:
                channel.message(header)
                channel.send(Header(CommonOperation.DONE))
                self._master.log.ended.set()
            case _:
                raise RefusedError(f"{header.operation.name} from {name}")
