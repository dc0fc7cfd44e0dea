"""Payloads travel through memory shared by two processes; peers that share anything else are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum

import pytest
import torch

from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, Header, RefusedError, view_bytes

Pair = tuple[Channel, Channel]


class Operation(IntEnum):
    WEIGHTS = 32


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected channels that share memory."""
    here, there = (Channel(end, operations=Operation) for end in socket.socketpair())
    here.offer_share(5.0)
    assert there.receive_header().operation == CommonOperation.SHARE
    there.accept_share(5.0)
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("sizes", [(1 << 15,), (7, 3 << 20, 1, 1 << 20, 6 << 20), (4 << 20, 4 << 20), (100,)])
def test_a_payload_arrives_as_it_was_sent_in_both_directions(pair: Pair, sizes: tuple[int, ...]) -> None:
    """The receiver splits the parts differently from the sender; some fit the shared memory, others are larger."""
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    header = Header(Operation.WEIGHTS, shape=(sum(sizes),))
    for sender, receiver in (pair, pair[::-1]):
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        third = len(received) // 3
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                sending = pool.submit(sender.send, header, [view_bytes(part) for part in parts])
                assert receiver.receive_header() == header
                receiver.receive_into([view_bytes(received[:third]), view_bytes(received[third:])])
                sending.result()
                assert torch.equal(received, torch.cat(parts))
                received.zero_()


@pytest.mark.parametrize("sends", [True, False])
def test_waiting_for_a_peer_that_has_gone_raises_an_error(pair: Pair, sends: bool) -> None:
    large = torch.zeros(16 << 20, dtype=torch.uint8)
    header = Header(Operation.WEIGHTS, shape=(len(large),))
    with ThreadPoolExecutor(1) as pool:
        if sends:
            waiting = pool.submit(pair[0].send, header, [view_bytes(large)])
            pair[1].receive_header()
        else:
            waiting = pool.submit(pair[0].receive_into, [view_bytes(large)])
        pair[1].close()
        with pytest.raises(LostError):
            waiting.result(timeout=120)


def test_memory_that_the_client_could_shrink_is_refused() -> None:
    ends = socket.socketpair()
    lines = [line.fileno() for line in ends]
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 8 << 20)
    pipe = os.pipe()
    for descriptors in ([loose, *lines], [pipe[0], *lines], [loose], []):
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(here, [b"\0"], descriptors)
            with pytest.raises(RefusedError, match="failed to map|not sealed against resizing"):
                Channel(there, operations=Operation).accept_share(5.0)
    for descriptor in (loose, *pipe):
        os.close(descriptor)
    for end in ends:
        end.close()
