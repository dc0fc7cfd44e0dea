"""The example of docs/api/transport.md works, and refuses invalid requests."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from worldsize.net.channel import Channel
from worldsize.net.endpoints import ConnectionServer
from worldsize.net.frames import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    CommonOperation,
    Header,
    RefusedError,
    operations_by_number,
    tensor_frame,
)
from worldsize.net.registry import Dialer, EndedError, Registry

PAGE = Path(__file__).parents[2] / "docs" / "api" / "transport.md"


@pytest.fixture
def example() -> dict[str, Any]:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def server(example: dict[str, Any], tmp_path: Path) -> Iterator[ConnectionServer]:
    serving: ConnectionServer = example["serve"](tmp_path)
    yield serving
    with suppress(OSError):
        serving.listener.shutdown(socket.SHUT_RDWR)
    serving.listener.close()


def joined(example: dict[str, Any], folder: Path, kind: str = "add") -> Channel:
    return Dialer("worker-0", Registry(folder, 5.0), None, 5.0, example["Operation"]).connect("sum", kind)[0]


def test_the_example_adds_up_what_workers_send(
    example: dict[str, Any], server: ConnectionServer, tmp_path: Path
) -> None:
    assert example["add"](tmp_path, "worker-0", torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]
    assert example["add"](tmp_path, "worker-1", torch.tensor([1.0, 0.0, 0.0])).tolist() == [2.0, 2.0, 3.0]
    assert server.refused == 0


def test_another_shape_is_refused_with_the_reason(
    example: dict[str, Any], server: ConnectionServer, tmp_path: Path
) -> None:
    channel = joined(example, tmp_path)
    channel.send(*tensor_frame(example["Operation"].ADD, torch.zeros(4)))
    with pytest.raises(RefusedError, match=r"ADD: expected torch.float32 \[3\], got torch.float32 \[4\]"):
        channel.receive_answer(example["Operation"].SUM)
    assert server.refused == 1
    channel.close()


def test_a_service_that_is_not_there_is_refused(
    example: dict[str, Any], server: ConnectionServer, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match="invalid JOIN"):
        joined(example, tmp_path, "subtract")


def test_an_operation_of_another_protocol_is_refused(
    example: dict[str, Any], server: ConnectionServer, tmp_path: Path
) -> None:
    class Other(IntEnum):
        MULTIPLY = 99

    channel = joined(example, tmp_path)
    channel.send(Header(Other.MULTIPLY))
    with pytest.raises(RefusedError, match="unknown operation 99"):
        channel.receive_answer(example["Operation"].SUM)
    channel.close()


def test_a_message_that_is_too_large_is_refused_before_memory_is_taken_for_it() -> None:
    with pytest.raises(RefusedError, match="invalid message payload"):
        Header(CommonOperation.JOIN, shape=(MAX_MESSAGE_BYTES + 1,)).require_message()


def test_a_protocol_cannot_take_the_number_of_a_common_operation() -> None:
    class Greedy(IntEnum):
        MINE = int(CommonOperation.JOIN)

    with pytest.raises(ValueError, match="between 32 and 255"):
        operations_by_number(Greedy)


def test_whoever_looks_for_a_service_is_told_that_the_run_has_ended(tmp_path: Path) -> None:
    registry = Registry(tmp_path, 5.0)
    registry.mark_ended()
    with pytest.raises(EndedError):
        registry.wait_for_server("sum")


def test_a_service_has_one_process_in_an_epoch(tmp_path: Path) -> None:
    registry = Registry(tmp_path, 5.0)
    assert registry.acquire("sum", 1, "unix:/a", "sum-0")
    assert not registry.acquire("sum", 1, "unix:/b", "sum-1")
    assert registry.acquire("sum", 2, "unix:/b", "sum-1")
    newest = registry.read_newest("sum")
    assert newest is not None
    assert (newest.epoch, newest.name) == (2, "sum-1")


def test_a_header_has_the_size_that_the_documentation_says() -> None:
    assert len(Header(CommonOperation.DONE).pack()) == HEADER_BYTES == 104
