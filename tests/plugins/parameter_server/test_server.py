"""A real server does not trust its clients."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.parameter_server.protocol import Fields, Operation, Sessions
from plugins.parameter_server.replication import ReplicationLog, SoleMastership
from plugins.parameter_server.server import ShardServer
from plugins.parameter_server.shard import PushReceiver, Rule, Shard
from plugins.parameter_server.shard_master import ShardMaster
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import plan_shards
from worldsize.errors import ConfigError
from worldsize.net.channel import Channel, LostError
from worldsize.net.credentials import Credentials, create_authority, issue_certificate
from worldsize.net.endpoints import connect_channel, get_listener_address, open_listener
from worldsize.net.frames import HEADER_BYTES, LAYOUT, MAGIC, CommonOperation, Header, RefusedError, view_bytes
from worldsize.strategies.train_state import OptimizerPart

OPEN: list[Any] = []  # sockets and channels that the test has opened


@pytest.fixture(autouse=True)
def closed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("INFO", logger="worldsize")
    yield
    while OPEN:
        OPEN.pop().close()


def made(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def learning() -> OptimizerPart:
    torch.manual_seed(1)
    model = nn.Linear(3, 5)
    return OptimizerPart(model, made(model))


def served(listener: socket.socket, keys: Credentials | None = None, **rule: Any) -> ShardServer:
    learned = learning()
    (owned,) = plan_shards(dict(learned.model.named_parameters()), 1, bucket_bytes=1 << 20, cut=True)
    log = ReplicationLog(SoleMastership(), lease=5.0, expects_standby=False)
    receiver = PushReceiver(Shard(ShardParameters(learned, owned, make=made), Rule(1, **rule)), None)
    server = ShardServer(ShardMaster(receiver, Sessions(), log, timeout=60.0), listener, keys)
    server.start()
    OPEN.append(listener)
    return server


@pytest.fixture
def server(tmp_path: Path) -> ShardServer:
    return served(open_listener(f"unix:{tmp_path}/server", None))


def joined(server: ShardServer, keys: Credentials | None = None, *, name: str = "worker-0", epoch: int = 1) -> Channel:
    channel = connect_channel(
        get_listener_address(server.connections.listener), keys, peer="server-0", seconds=60.0, operations=Operation
    )
    OPEN.append(channel)
    channel.wait_at_most(60.0)
    channel.send_message(CommonOperation.JOIN, {"kind": "data", "name": name, "epoch": epoch})
    channel.receive_message(channel.receive_answer(CommonOperation.WELCOME))
    return channel


FIELDS = Fields(0, width=1, node=0, epoch=1, sequence=1, step=1)
GOOD = Header(Operation.PUSH, torch.float32, (20,), FIELDS)


def with_fields(**changed: int) -> Header:
    return GOOD._replace(fields=FIELDS._replace(**changed))


def push(channel: Channel, gradient: Tensor, header: Header = GOOD) -> None:
    channel.send(header, [view_bytes(gradient)])
    channel.receive_answer(CommonOperation.DONE)


def weights(server: ShardServer) -> Tensor:
    return server.master.shard.parameters.values[0].clone()


def assert_it_serves(server: ShardServer) -> None:
    """Let an honest worker train a step, and check the result."""
    before, step = weights(server), server.master.shard.step
    gradient = torch.arange(20.0)
    channel = joined(server, name=f"worker-{random.random()}")
    push(channel, gradient.clone(), with_fields(step=step + 1))
    assert torch.allclose(weights(server), before - 0.1 * gradient)
    channel.send(Header(Operation.PULL, fields=Fields(step=step + 1)))
    header, received = channel.receive_answer(Operation.WEIGHTS), torch.empty(20)
    assert Fields._make(header.fields).step == step + 1
    channel.receive_into([view_bytes(received)])
    assert torch.equal(received, weights(server))


BAD = {
    "a shape": (GOOD._replace(shape=(21,)), "expected torch.float32 [20]"),
    "a dtype": (GOOD._replace(dtype=torch.float64), "expected torch.float32 [20]"),
    "a table": (with_fields(table=1), "unknown table 1 in PUSH; the shard has 1 tables"),
    "a step": (with_fields(step=3), "the shard is at step 1"),
    "a part": (with_fields(width=4), "part 0 of 4"),
    "no part": (with_fields(node=7), "part 7 of 1"),
    "an epoch": (with_fields(epoch=9), ", expected PUSH 1 of epoch 1"),
    "a number": (with_fields(sequence=5), "PUSH 5 of epoch 1, expected PUSH 1 of epoch 1"),
    "an operation": (GOOD._replace(operation=Operation.APPLY), "APPLY from a worker"),
    "much": (GOOD._replace(shape=(1 << 36,)), "expected torch.float32 [20]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_frame_that_does_not_fit_is_refused_and_changes_nothing(
    server: ShardServer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    header, message = BAD[case]
    before = weights(server)
    channel = joined(server)
    with pytest.raises(RefusedError) as error:
        push(channel, torch.ones(20), header)
    assert message in str(error.value)
    assert torch.equal(weights(server), before)
    assert_it_serves(server)
    assert f"refused worker-0: {error.value}" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_refused(server: ShardServer, value: float) -> None:
    gradient = torch.ones(20)
    gradient[7] = value
    with pytest.raises(RefusedError, match="NaN or infinity"):
        push(joined(server), gradient)
    assert_it_serves(server)


def test_nan_is_accepted_if_the_policy_allows_it(tmp_path: Path) -> None:
    server = served(open_listener(f"unix:{tmp_path}/server", None), finite=False)
    push(joined(server), torch.full((20,), float("nan")))
    assert weights(server).isnan().all()


def test_a_frame_that_is_sent_twice_counts_once(server: ShardServer) -> None:
    channel = joined(server)
    push(channel, torch.ones(20))
    after = weights(server)
    with pytest.raises(RefusedError, match="received PUSH 1 of epoch 1, expected PUSH 2 of epoch 1"):
        push(channel, torch.ones(20))
    assert torch.equal(weights(server), after)
    again = joined(server)  # the same epoch, as after a broken connection
    with pytest.raises(RefusedError, match="expected PUSH 2 of epoch 1"):
        push(again, torch.ones(20))
    assert torch.equal(weights(server), after)
    assert_it_serves(server)


def test_a_part_that_two_workers_computed_counts_once(server: ShardServer) -> None:
    push(joined(server), torch.ones(20))
    after = weights(server)
    push(joined(server, name="worker-1"), torch.ones(20))
    assert torch.equal(weights(server), after)
    assert server.master.shard.step == 1


def test_a_worker_of_an_earlier_epoch_is_refused(server: ShardServer) -> None:
    old = joined(server, epoch=1)
    joined(server, epoch=2)
    with pytest.raises(RefusedError, match="stale epoch 1"):
        joined(server, epoch=1)
    push(old, torch.ones(20))  # the worker of epoch 2 has not done this part yet
    assert server.master.shard.step == 1


def test_a_step_that_is_not_complete_is_neither_weighed_nor_does_it_have_a_norm() -> None:
    learned = learning()
    (owned,) = plan_shards(dict(learned.model.named_parameters()), 1, bucket_bytes=1 << 20, cut=True)
    shard = Shard(ShardParameters(learned, owned, make=made), Rule(1, requires_commit=True))
    log = ReplicationLog(SoleMastership(), lease=5.0, expects_standby=False)
    master = ShardMaster(PushReceiver(shard, None), Sessions(), log, timeout=0.01)
    with pytest.raises(RefusedError, match="the gradients of step 1 are incomplete"):
        master.compute_step_norms()
    with pytest.raises(RefusedError, match="the gradients of step 1 are incomplete"):
        master.scale_step_gradient(1, 0.5)


@pytest.mark.heavy
def test_ten_thousand_frames_of_noise_change_nothing(server: ShardServer, caplog: pytest.LogCaptureFixture) -> None:
    before, noise, hello = weights(server), random.Random(7), b"".join(_join_bytes())
    address = get_listener_address(server.connections.listener).removeprefix("unix:")
    for number in range(10_000):
        frame = _noise(noise, hello)
        if number % 50 == 0:  # over a connection, like an outsider
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                connection.sendall(frame)
        else:  # directly, without a thread per frame
            ours, theirs = socket.socketpair()
            with theirs:
                theirs.sendall(frame)
                theirs.shutdown(socket.SHUT_WR)
                server.connections.serve(ours)
    assert torch.equal(weights(server), before)
    assert_it_serves(server)
    assert server.connections.refused > 5_000  # the other frames were too short to be refused
    assert "not a frame" in caplog.text


def _join_bytes() -> list[bytes]:
    data = b'{"kind": "data", "name": "worker-7", "epoch": 1}'
    return [Header(CommonOperation.JOIN, shape=(len(data),)).pack(), data]


def _noise(noise: random.Random, hello: bytes) -> bytes:
    """Return random bytes, a random header, or a valid header with random changes; a valid JOIN may come first."""
    kind = noise.randrange(4)
    if kind == 0:
        frame = bytearray(noise.randbytes(noise.randrange(1, 300)))
    elif kind == 1:
        frame = bytearray(MAGIC + noise.randbytes(HEADER_BYTES - len(MAGIC) + 100))
    else:
        frame = bytearray(GOOD.pack() + struct.pack("<20f", *([1.0] * 20)))
        for _ in range(noise.randrange(1, 6)):
            frame[noise.randrange(4, LAYOUT.size)] = noise.randrange(256)
        if _is_good(frame):
            frame[0] = 0
    return (hello if noise.random() < 0.7 else b"") + bytes(frame)


def _is_good(frame: bytearray) -> bool:
    """Return whether the changes cancel out, or touch only fields unused by a PUSH."""
    good = bytearray(GOOD.pack())
    return all(frame[i] == good[i] for i in range(HEADER_BYTES) if i not in (7, *range(32, 40)))


# ---------------------------------------------------------------- between hosts


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    create_authority(folder)
    return folder


def test_members_of_the_run_are_served_over_tls(keys: Path) -> None:
    server = served(open_listener("tcp:127.0.0.1:0", None), issue_certificate(keys, "server-0"))
    before = weights(server)
    push(joined(server, issue_certificate(keys, "worker-0")), torch.ones(20))
    assert torch.allclose(weights(server), before - 0.1)
    assert {path.stat().st_mode & 0o777 for path in keys.glob("*.key")} == {0o600}


def test_strangers_are_refused(keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = served(open_listener("tcp:127.0.0.1:0", None), issue_certificate(keys, "server-0"))
    before = weights(server)
    create_authority(tmp_path / "other")
    with pytest.raises((RefusedError, LostError)):  # with a certificate from a different run
        joined(server, issue_certificate(tmp_path / "other", "worker-0"))
    with pytest.raises((RefusedError, LostError)):  # without a certificate
        joined(server, None)
    with pytest.raises(RefusedError, match="the certificate has worker-1, JOIN has worker-0"):
        joined(server, issue_certificate(keys, "worker-1"), name="worker-0")
    push(joined(server, issue_certificate(keys, "worker-0")), torch.ones(20))
    assert torch.allclose(weights(server), before - 0.1)
    assert "certificate not issued by this run" in caplog.text


def test_a_client_does_not_talk_to_a_server_that_is_somebody_else(keys: Path) -> None:
    impostor = served(open_listener("tcp:127.0.0.1:0", None), issue_certificate(keys, "worker-5"))
    with pytest.raises(RefusedError, match="expected the peer 'server-0', got 'worker-5'"):
        joined(impostor, issue_certificate(keys, "worker-0"))


def test_no_port_is_opened_to_the_network_without_keys() -> None:
    with pytest.raises(ConfigError, match="requires TLS"):
        open_listener("tcp:0.0.0.0:0", None)


def test_a_key_that_others_may_read_is_refused(keys: Path) -> None:
    issue_certificate(keys, "worker-0")
    (keys / "worker-0.key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        issue_certificate(keys, "worker-0")
    (keys / "authority.key").unlink()
    with pytest.raises(ConfigError, match="not a member of the run"):
        issue_certificate(keys, "worker-1")
