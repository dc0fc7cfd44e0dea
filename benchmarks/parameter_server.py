"""Compare the parameter server with other ways to transfer the same bytes: bare sockets, gloo, torch RPC.

uv run python benchmarks/parameter_server.py dense 5        # push + pull of 64 MiB
uv run python benchmarks/parameter_server.py sparse 5       # pull + push of rows of a table of a million
uv run python benchmarks/parameter_server.py straggler 3    # one of four workers is five times slower
uv run python benchmarks/parameter_server.py network 1000   # hosts with links of 1,000 Mbit/s (root; namespaces)
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Drawn
from torch import Tensor, nn
from torch.distributed import rpc

from links import trained_on
from plugins.parameter_server.protocol import Operation, Peer, Sessions, shard_service
from plugins.parameter_server.replication import ReplicationLog, SoleMastership
from plugins.parameter_server.row_store import create_row_update
from plugins.parameter_server.row_tables import RowRule, Rows, Table
from plugins.parameter_server.server import ShardServer
from plugins.parameter_server.shard import PushReceiver, Rule, Shard
from plugins.parameter_server.shard_link import ShardLink
from plugins.parameter_server.shard_master import ShardMaster
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import plan_shards
from worldsize.core import RowValues
from worldsize.net.credentials import Credentials, create_authority, issue_certificate
from worldsize.net.endpoints import get_listener_address, open_listener
from worldsize.net.frames import view_bytes
from worldsize.net.registry import Dialer, Registry
from worldsize.strategies.train_state import OptimizerPart
from worldsize.testing.hosts import run_hosts

PARAMETERS, EACH = 16, 1 << 20  # 16 × 4 MiB
BYTES = PARAMETERS * EACH * 4
ROWS, DIM = 1_000_000, 64
TOUCHED = (100, 500, 2_000)  # rows per batch
REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY))
Round = Callable[[], object]


# ---------------------------------------------------------------- ours


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _serve(folder: Path, wire: str, *, sparse: bool) -> None:
    torch.set_num_threads(1)
    keys = issue_certificate(folder / "keys", "server-0") if wire == "tls" else None
    listener = open_listener("tcp:127.0.0.1:0" if wire == "tls" else f"unix:{folder}/server", keys)
    model = nn.ParameterList([torch.zeros(0 if sparse else EACH) for _ in range(1 if sparse else PARAMETERS)])
    optimizer = _sgd(model)
    owned = () if sparse else plan_shards(dict(model.named_parameters()), 1, bucket_bytes=4 << 20, cut=True)[0]
    update = create_row_update(optimizer, optimizer.param_groups[0], TABLE.name)
    tables = [Rows(TABLE, RowRule(seed=0), 0, update)] if sparse else []
    parameters = ShardParameters(OptimizerPart(model, optimizer), owned, tables, make=_sgd)
    shard = Shard(parameters, Rule(1, requires_commit=not sparse))
    log = ReplicationLog(SoleMastership(), lease=5.0, expects_standby=False)
    server = ShardServer(ShardMaster(PushReceiver(shard, None), Sessions(), log, timeout=60.0), listener, keys)
    server.start()
    Registry(folder / "directory", 60.0).acquire(shard_service(0), 1, get_listener_address(listener), "server-0")
    log.ended.wait()


TABLE = Table("words.weight", ROWS, DIM, None, RowValues())


@contextmanager
def ours(wire: str, *, touched: int = 0) -> Iterator[Round]:
    """Start a server; yield a function that pushes and pulls all weights, or ``touched`` rows, once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "directory").mkdir()
        if wire == "tls":
            create_authority(folder / "keys")
        process = get_context("fork").Process(target=_serve, args=(folder, wire), kwargs={"sparse": touched > 0})
        process.start()
        keys = issue_certificate(folder / "keys", "worker-0") if wire == "tls" else None
        directory = Registry(folder / "directory", 60.0)
        link = ShardLink(Dialer("worker-0", directory, keys, 60.0, Operation), 0, epoch=1)
        leads = issue_certificate(folder / "keys", "server-1") if wire == "tls" else None
        peer = Peer(Dialer("server-1", directory, leads, 60.0, Operation), 0)
        yield _sparse_rounds(link, touched) if touched else _dense_rounds(link, peer)
        link.close()
        process.kill()
        process.join()


def _dense_rounds(link: ShardLink, peer: Peer) -> Round:
    gradients = [torch.zeros(EACH) for _ in range(PARAMETERS)]
    memory = [(torch.float32, [view_bytes(torch.zeros(EACH))]) for _ in range(PARAMETERS)]
    steps = iter(range(1, 1 << 30))

    def once() -> None:
        step = next(steps)
        for table, gradient in enumerate(gradients):
            link.push_bucket(table, torch.float32, [view_bytes(gradient)], step=step, width=1, node=0)
        link.wait_for_pushes()
        peer.send_command(Operation.APPLY, {"step": step, "factor": 1.0})
        link.request_weights(step)
        link.receive_weights(memory)

    return once


def _sparse_rounds(link: ShardLink, touched: int) -> Round:
    batches, steps = _batches(touched), iter(range(1, 1 << 30))

    def once() -> None:
        step = next(steps)
        ids_n = batches[step % len(batches)]
        link.ask_rows(0, ids_n, step=step - 1)
        rows_nd, _ = link.receive_rows(0, ids_n, DIM, step=step - 1)
        link.push_rows(0, ids_n, rows_nd, step=step, width=1, node=0)  # acknowledged with the next pull, as in training

    return once


def _batches(touched: int) -> list[Tensor]:
    """Sample the row ids of 32 batches: a few rows are in every batch, most are rare."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.rand(3 * touched, generator=generator).pow(6) * ROWS for _ in range(32)]
    return [torch.unique(each.long())[:touched] for each in drawn]


# ---------------------------------------------------------------- bare sockets


@contextmanager
def bare(wire: str) -> Iterator[Round]:
    """Yield a function that sends all weights over a bare socket and receives as many bytes back."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys: Credentials | None = None
        if wire == "tls":
            create_authority(folder)
            keys = issue_certificate(folder, "server-0")
        listener = open_listener("tcp:127.0.0.1:0" if wire == "tls" else f"unix:{folder}/server", keys)
        process = get_context("fork").Process(target=_bare_server, args=(listener, keys))
        process.start()
        connection: socket.socket | ssl.SSLSocket = socket.socket(listener.family)
        _roomy(connection)
        connection.connect(listener.getsockname())
        if wire == "tls":
            connection = issue_certificate(folder, "worker-0").tls_context(server=False).wrap_socket(connection)
        buffer = memoryview(bytearray(BYTES))

        def once() -> None:
            connection.sendall(buffer)
            _fill(connection, buffer)

        yield once
        connection.close()
        process.kill()
        process.join()
        listener.close()


def _bare_server(listener: socket.socket, keys: Credentials | None) -> None:
    connection, _ = listener.accept()
    _roomy(connection)
    if keys:
        connection = keys.tls_context(server=True).wrap_socket(connection, server_side=True)
    buffer = memoryview(bytearray(BYTES))
    while True:
        _fill(connection, buffer)
        connection.sendall(buffer)


def _roomy(connection: socket.socket) -> None:
    """Give the socket the same buffer sizes as worldsize does."""
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, 1 << 20)


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(buffer):
        count = connection.recv_into(buffer, flags=flags) if flags else connection.recv_into(buffer)
        if not count:
            os._exit(0)
        buffer = buffer[count:]


# ---------------------------------------------------------------- gloo and torch RPC


@contextmanager
def gloo(make: Callable[[int], Round]) -> Iterator[Round]:
    """Start a second rank that repeats ``make(1)()``, and yield ``make(0)`` for this rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        process = get_context("fork").Process(target=_gloo_peer, args=(store, make))
        process.start()
        _join(store, 0)
        yield make(0)
        dist.destroy_process_group()
        process.kill()
        process.join()


def _join(store: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))


def _gloo_peer(store: str, make: Callable[[int], Round]) -> None:
    torch.set_num_threads(1)
    _join(store, 1)
    once = make(1)
    while True:
        once()


def send_and_receive(rank: int) -> Round:
    tensors = [torch.zeros(EACH) for _ in range(PARAMETERS)]

    def once() -> None:
        for step in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            for tensor in tensors:
                step(tensor, 1 - rank)

    return once


def send_rows(rank: int, *, touched: int) -> Round:
    """Send ids, receive rows, then send ids and gradients; no rows are looked up or updated."""
    ids_n, rows_nd = torch.zeros(touched, dtype=torch.int64), torch.zeros(touched, DIM)
    exchange = ((dist.send, dist.recv), (dist.recv, dist.send))[rank]

    def once() -> None:
        exchange[0](ids_n, 1 - rank)
        exchange[1](rows_nd, 1 - rank)
        exchange[0](ids_n, 1 - rank)
        exchange[0](rows_nd, 1 - rank)

    return once


def reduce_table(rank: int) -> Round:
    table_rd = torch.zeros(ROWS, DIM)
    return lambda: dist.all_reduce(table_rd)


WEIGHTS: dict[str, Tensor] = {}


def rpc_swap(gradients: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(WEIGHTS["dense"].unbind(), gradients, alpha=-0.1)
    return list(WEIGHTS["dense"].unbind())


def rpc_pull(ids_n: Tensor) -> Tensor:
    return WEIGHTS["rows"].index_select(0, ids_n)


def rpc_push(ids_n: Tensor, gradients_nd: Tensor) -> None:
    WEIGHTS["rows"].index_add_(0, ids_n, gradients_nd, alpha=-0.1)


def _rpc_begin(name: str, rank: int, folder: str) -> None:
    begin: Any = rpc.init_rpc
    options: Any = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=60)
    begin(name, rank=rank, world_size=2, rpc_backend_options=options)


def _rpc_server(folder: str, sparse: bool) -> None:
    torch.set_num_threads(1)
    WEIGHTS["rows" if sparse else "dense"] = torch.zeros(*((ROWS, DIM) if sparse else (PARAMETERS, EACH)))
    _rpc_begin("server", 1, folder)
    time.sleep(3600)


@contextmanager
def torch_rpc(*, touched: int = 0) -> Iterator[Round]:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        process = get_context("fork").Process(target=_rpc_server, args=(folder, touched > 0))
        process.start()
        _rpc_begin("client", 0, folder)
        gradients, batches, steps = [torch.zeros(EACH)] * PARAMETERS, _batches(touched or 1), iter(range(1 << 30))

        def dense_once() -> None:
            rpc.rpc_sync("server", rpc_swap, args=(gradients,))

        def sparse_once() -> None:
            ids_n = batches[next(steps) % len(batches)]
            rows_nd = rpc.rpc_sync("server", rpc_pull, args=(ids_n,))
            rpc.rpc_sync("server", rpc_push, args=(ids_n, rows_nd))

        yield sparse_once if touched else dense_once
        process.kill()
        process.join()
        end: Any = rpc.shutdown
        end(graceful=False)


# ---------------------------------------------------------------- side by side


def timed(contender: Callable[[], Any], seconds: float) -> float:
    """Return the median seconds of a round, measured in a separate process."""
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_timed, args=(contender, seconds, sender))
    process.start()
    median = float(receiver.recv())
    process.join()
    return median


def _timed(contender: Callable[[], Any], seconds: float, sender: Any) -> None:
    torch.set_num_threads(1)
    with contender() as once:
        for _ in range(3):
            once()
        times: list[float] = []
        while sum(times) < seconds:
            begun = time.perf_counter()
            once()
            times.append(time.perf_counter() - begun)
        sender.send(statistics.median(times))


def alternately(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return each contender's median seconds over ``rounds``, in which contenders take turns."""
    times_of: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            print(f"round {number + 1}/{rounds}: {name}", file=sys.stderr)
            times_of[name].append(timed(contender, 1.5))
    return {name: statistics.median(times) for name, times in times_of.items()}


def dense(rounds: int = 5) -> None:
    contenders: dict[str, Callable[[], Any]] = {
        "bare Unix socket": partial(bare, "unix"),
        "worldsize, Unix": partial(ours, "unix"),
        "bare TLS": partial(bare, "tls"),
        "worldsize, TLS": partial(ours, "tls"),
        "gloo send and receive": partial(gloo, send_and_receive),
        "torch RPC": torch_rpc,
    }
    medians = alternately(contenders, rounds)
    drawn = Drawn("push + pull of 64 MiB", "MB/s per direction", "to the bare socket", title=f"median of {rounds}")
    for name, seconds in medians.items():
        limit = medians["bare TLS" if "TLS" in name else "bare Unix socket"]
        drawn.add_row(name, f"{2 * BYTES / seconds / 1e6:,.0f}", f"{limit / seconds:.2f} ×")
    Console().print(drawn)


def sparse(rounds: int = 5) -> None:
    drawn = Drawn(
        "rows/s, to torch RPC", *map(str, TOUCHED), title=f"rows of {DIM} numbers a batch, median of {rounds}"
    )
    medians = {touched: alternately(_of_rows(touched), rounds) for touched in TOUCHED}
    for name in _of_rows(1):
        rates = [
            (touched / seconds[name], seconds["torch RPC"] / seconds[name]) for touched, seconds in medians.items()
        ]
        drawn.add_row(name, *(f"{rate:,.0f}  {ratio:.2g} ×" for rate, ratio in rates))
    Console().print(drawn)


def _of_rows(touched: int) -> dict[str, Callable[[], Any]]:
    return {
        "worldsize, Unix": partial(ours, "unix", touched=touched),
        "worldsize, TLS": partial(ours, "tls", touched=touched),
        "torch RPC": partial(torch_rpc, touched=touched),
        "gloo send and receive": partial(gloo, partial(send_rows, touched=touched)),
        "all-reduce of the whole table": partial(gloo, reduce_table),
    }


# ---------------------------------------------------------------- a slow worker

WORKERS, STEPS, PAUSE = 4, 120, 0.03
WAYS = {"sync": ("sync", 0), "bounded, 4": ("bounded", 4), "async": ("async", 0)}


def straggler(rounds: int = 3) -> None:
    """Measure the throughput that remains when one worker is five times slower than the others.

    Each unit sleeps for 30 ms, on the slow worker for 150 ms.
    """
    slow = f"{{action: sleep, rank: 1, seconds: {4 * PAUSE}}}"
    results = {
        (way, slowed): [_trained(*WAYS[way], slow if slowed else "") for _ in range(rounds)]
        for way in WAYS
        for slowed in (False, True)
    }
    drawn = Drawn("", "samples/s", "one worker 5 × slower", "kept", "accuracy", title=f"median of {rounds}")
    for way in WAYS:
        rate, slowed = (statistics.median(run[0] for run in results[way, each]) for each in (False, True))
        accuracy = statistics.median(run[1] for run in results[way, True])
        drawn.add_row(way, f"{rate:,.0f}", f"{slowed:,.0f}", f"{slowed / rate:.2f}", f"{accuracy:.3f}")
    Console().print(drawn)


def _trained(consistency: str, staleness: int, slow: str) -> tuple[float, float]:
    """Train, and return samples per second and the final accuracy."""
    pause = ", ".join(f"{{action: sleep, rank: {rank}, seconds: {PAUSE}}}" for rank in range(1, WORKERS + 1))
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *("recipe=digits", f"steps={STEPS}", "cluster.threads=1", "logger=none", "strategy=parameter_server"),
            *(f"cluster.processes={WORKERS + 1}", f"strategy.consistency={consistency}", f"run.root={folder}"),
            *(f"strategy.staleness={staleness}", "log_every=1", f"faults=[{', '.join(filter(None, (pause, slow)))}]"),
        ]
        subprocess.run([sys.executable, "train.py", *words], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).rglob("result.json")
        lines = [json.loads(line) for line in file.with_name("metrics.jsonl").read_text().splitlines()]
        rates = [line["samples_per_second"] for line in lines if line["event"] == "step"][10:]
        accuracy = float(json.loads(file.read_text())["metrics"]["accuracy"])
    return len(rates) / sum(1 / rate for rate in rates), accuracy


# ---------------------------------------------------------------- over shaped links

MODEL = ("recipe=stdlib_lm", "recipe.width=512", "recipe.depth=3", "recipe.context=8", "clip_norm=null")


def network(megabits: int = 1000) -> None:
    """Measure a step of 4 workers on separate hosts: with DDP, and with 1, 2 and 4 servers on further hosts."""
    size = 4 * sum(p.numel() for p in _gpt().parameters())  # bytes
    rate = megabits * 1e6 / 8
    title = f"{size / 1e6:.0f} MB of parameters, {WORKERS} workers, {megabits:,} Mbit/s a host"
    drawn = Drawn("", "step, s", "formula", "formula, s", "to it", title=title)
    ring = 2 * (WORKERS - 1) / WORKERS * size / rate
    ways = {"DDP": (0, "2(n-1)M/nB", ring)}
    for servers in (1, 2, 4):
        one_way = max(size / rate, WORKERS * size / (servers * rate))
        ways[f"{servers} servers"] = (servers, "2 max(M/B, nM/kB)", 2 * one_way)
    for name, (servers, formula, seconds) in ways.items():
        measured = _over_links(servers, megabits)
        drawn.add_row(name, f"{measured:.2f}", formula, f"{seconds:.2f}", f"{measured / seconds:.2f} ×")
    Console().print(drawn)


def _gpt() -> nn.Module:
    from recipes.stdlib_lm.recipe import StdlibLM

    return StdlibLM(512, 3, 4, 8, 0.0, 1000, partial(torch.optim.SGD, lr=0.1)).model()


def _over_links(servers: int, megabits: int) -> float:
    """Return the median seconds of a step, with DDP if ``servers`` is 0."""
    strategy = ("strategy=parameter_server", f"strategy.servers={servers}") if servers else ("strategy=ddp",)
    with (
        tempfile.TemporaryDirectory() as folder,
        run_hosts(Path(folder), name="bench", count=WORKERS + servers) as hosts,
    ):
        hosts.shape_links(f"{megabits}mbit")
        words = (*MODEL, *strategy, "cluster.processes_per_node=1", "batch_size=4", "steps=12")
        return statistics.median(
            4 / float(line["samples_per_second"]) for line in trained_on(hosts, *words, "log_every=1")[3:]
        )


if __name__ == "__main__":
    commands = {"dense": dense, "sparse": sparse, "straggler": straggler, "network": network}
    commands[sys.argv[1]](*map(int, sys.argv[2:]))
