"""Measure rehearsals: cost by world size, time to find planted faults, error of the predicted memory.

uv run python benchmarks/rehearse.py worlds 64,512,4096     # seconds, calls, memory and open files of a rank
uv run python benchmarks/rehearse.py begin 1024             # one rank's initialization of a 6.7 B Llama
uv run python benchmarks/rehearse.py store 8,32,64,256      # messages of real ranks to the store, and their sockets
uv run python benchmarks/rehearse.py faults 64 ddp,fsdp     # six planted faults under each strategy
uv run python benchmarks/rehearse.py memory                 # planned and used memory of 20 runs, four processes
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch.distributed import FileStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[1]))
from tests.plan.rehearsal.composed import really
from tests.plan.rehearsal.faulty import FAULTS, Faulty, line
from worldsize.config.compose import compose_and_call
from worldsize.config.composed import build_settings
from worldsize.config.settings import Settings
from worldsize.core import Cluster, Role, RunContext
from worldsize.plan.dry_run import world_seen_by
from worldsize.plan.predictor import Given, Predictor
from worldsize.plan.rehearsal.exchange import SentMessages
from worldsize.plan.rehearsal.rank import RehearsedPart, load_splits, rehearse_rank
from worldsize.plan.rehearsal.ranks import compute_traffic, rehearse
from worldsize.plan.rehearsal.waiting import differences
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.world.environments import Placement
from worldsize.world.world import open_world

PER_NODE, FAULTY = 8, 5
MODEL = ("recipe=stdlib_lm", "recipe.width=64", "recipe.depth=4", "recipe.context=16")
STRATEGIES = ("ddp", "zero", "fsdp", "hsdp", "mesh", "diloco")


def composed(work: Callable[[Settings], Any], *options: str) -> Any:
    """Call ``work`` with the settings composed from ``options`` in a separate process; return its result."""
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def body() -> None:
        torch.set_num_threads(1)
        compose_and_call(lambda cfg: theirs.send(_worked(cfg, work)), ["logger=none", "cluster.threads=1", *options])

    process = context.Process(target=body)
    process.start()
    theirs.close()
    result = mine.recv()
    process.join()
    return result


def _worked(cfg: DictConfig, work: Callable[[Settings], Any]) -> Any:
    return work(build_settings(cfg))


# ---------------------------------------------------------------- cost by world size


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def one_rank(settings: Settings) -> list[float]:
    """Rehearse the last rank; return CPU seconds, calls per step, peak bytes, memory growth and opened files."""
    part = RehearsedPart()
    data, files = load_splits(settings, part), _open_files()
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rehearsed = rehearse_rank(settings.cluster.processes - 1, settings, part, data, SentMessages())
    seconds, after = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rehearsed.error is None, rehearsed.error
    calls = compute_traffic(rehearsed, PER_NODE, step=part.steps).calls
    return [seconds, calls, rehearsed.peak.nbytes, (after - before) * 1024, _open_files() - files]


def worlds(sizes: Sequence[int]) -> None:
    """Print the cost of rehearsing one rank, by strategy and world size."""
    table = Table("strategy", "ranks", "processor s", "calls a step", "peak MB", "process grew MB", "more open files")
    for strategy in STRATEGIES:
        for size in sizes:
            shape = (f"cluster.processes={size}", f"cluster.nodes={size // PER_NODE}", f"batch_size={size}")
            seconds, calls, peak, grew, files = composed(one_rank, *MODEL, f"strategy={strategy}", *shape)
            cells = (f"{seconds:.2f}", f"{calls:.0f}", f"{peak / 1e6:.2f}", f"{grew / 1e6:.0f}", f"{files:.0f}")
            table.add_row(strategy, f"{size:,}", *cells)
    Console(width=120).print(table)


# ---------------------------------------------------------------- planted faults


SEVEN_BILLION = (
    *("recipe=hf_causal_lm", "recipe.config.hidden_size=4096", "recipe.config.intermediate_size=11008"),
    *("recipe.config.num_hidden_layers=32", "recipe.config.num_attention_heads=32"),
    *("recipe.config.num_key_value_heads=32", "+recipe.config.vocab_size=32000"),
)


def begun(settings: Settings) -> tuple[float, float, int, int, int]:
    """Create a rank's replica; return CPU and wall seconds, and bytes: shards, largest parameter, memory growth."""
    cpu, wall, before = time.process_time(), time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with world_seen_by(3, settings, torch.device("cpu")) as world:
        replica = settings.strategy.replica(settings.recipe, RunContext(world))
        spent = time.process_time() - cpu, time.perf_counter() - wall
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        parameters = list(cast("SynchronousReplica", replica).model.parameters())
        shards = sum(cast("DTensor", parameter).to_local().nbytes for parameter in parameters)
        return *spent, shards, max(parameter.nbytes for parameter in parameters), grown


def begin(size: int) -> None:
    """Print the time and memory for one rank of ``size`` to initialize its shards of a large model."""
    shape = (f"cluster.processes={size}", f"cluster.nodes={size // PER_NODE}", f"batch_size={size}", "strategy=fsdp")
    cpu, wall, shards, largest, grown = composed(begun, *SEVEN_BILLION, *shape)
    table = Table("ranks", "processor s", "wall s", "shards MB", "largest parameter MB", "process grew MB")
    table.add_row(f"{size:,}", f"{cpu:.0f}", f"{wall:.0f}", *(f"{each / 1e6:.0f}" for each in (shards, largest, grown)))
    Console().print(table)


class Counting(Store):
    """Store that counts the requests of this process."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.messages = 0

    def set(self, key: str, value: str) -> None:
        self.messages += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.messages += 1
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self.messages += 1
        return self._store.add(key, value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.messages += 1
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        self.messages += 1
        return self._store.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def _joined(placement: Placement, said: Connection) -> None:
    """Join the world of ``placement``, all-reduce twice in each group, and send the request counts to ``said``."""
    size, stores, inherited = placement.world_size, list[Counting](), _open_files()

    def counted(url: str, **options: object) -> Iterator[tuple[Counting, int, int]]:
        stores.append(Counting(FileStore(urlsplit(url).path, size)))
        yield stores[0], placement.rank, size

    register_rendezvous_handler("counted", counted)  # type: ignore[no-untyped-call]
    cluster = Cluster("many", size // placement.local_world_size, size, "cpu", "gloo", threads=1)
    with open_world(placement, cluster, {"worker": Role(size)}) as world:
        begun = stores[0].messages
        for _ in range(2):
            for group in world.groups.values():
                dist.all_reduce(torch.ones(10_000), group=group)
        said.send((begun, stores[0].messages, _open_files() - inherited))
        dist.barrier()


def store(sizes: Sequence[int]) -> None:
    """Print, by world size, the store requests of real processes until every group has all-reduced."""
    table = Table(
        "ranks", "messages to join", "until all groups have summed", "files opened", title="the most of any rank"
    )
    context = get_context("fork")
    for size in sizes:
        with TemporaryDirectory() as folder:
            mine, theirs = context.Pipe(duplex=False)
            places = (
                Placement(rank, size, rank % PER_NODE, min(PER_NODE, size), f"counted://{folder}/store")
                for rank in range(size)
            )
            processes = [context.Process(target=_joined, args=(place, theirs)) for place in places]
            for process in processes:
                process.start()
            theirs.close()
            rows = [mine.recv() for _ in processes]
            for process in processes:
                process.join()
        table.add_row(str(size), *(str(max(column)) for column in zip(*rows, strict=True)))
    Console().print(table)


def named(settings: Settings, fault: str) -> tuple[float, str]:
    """Return the seconds to rehearse a planted fault, and the differences found, as text."""
    begun = time.perf_counter()
    faulty = replace(settings, recipe=Faulty(fault, FAULTY))
    found = differences(rehearse(faulty, range(settings.cluster.processes), RehearsedPart()))
    return time.perf_counter() - begun, "\n".join(map(str, found))


def faults(size: int, strategies: Sequence[str]) -> None:
    """Print the seconds to find each fault, and whether its rank and line are named."""
    table = Table("strategy", *FAULTS, title=f"seconds until one of {size} ranks is named with its line")
    for strategy in strategies:
        cells = []
        for fault in FAULTS:
            shape = (f"cluster.processes={size}", f"cluster.nodes={size // PER_NODE}", f"batch_size={size}")
            seconds, text = composed(partial(named, fault=fault), "recipe=digits", f"strategy={strategy}", *shape)
            own = line({"skip": "one"}.get(fault, fault))
            rank = "rank " if fault == "branch" else f"rank {FAULTY}:"
            cells.append(f"{seconds:.0f}" if own in text and text.startswith(rank) else f"{seconds:.0f}, not named")
        table.add_row(strategy, *cells)
    Console(width=120).print(table)


# ---------------------------------------------------------------- memory

GPT = ("recipe=stdlib_lm", "recipe.width=128", "recipe.depth=4", "recipe.context=64", "batch_size=32")
LLAMA = ("recipe=hf_causal_lm", "recipe.context=64", "batch_size=16")
DIGITS = ("recipe=digits", "recipe.width=64", "batch_size=64")
ACCUMULATED, RECOMPUTED = "logical_ranks=16", "activation_checkpointing=full"
CASES: Mapping[str, Sequence[str]] = {
    "GPT, ddp": (*GPT, "strategy=ddp"),
    "GPT, ddp, accumulation": (*GPT, "strategy=ddp", ACCUMULATED),
    "GPT, ddp, sums by node": (*GPT, "strategy=ddp", "cluster.nodes=2", "strategy.reduce=hierarchical"),
    "GPT, ddp, bf16": (*GPT, "strategy=ddp", "precision=bf16"),
    "GPT, ddp, elastic, accumulation": (*GPT, "strategy=ddp", ACCUMULATED, "reproducibility=elastic"),
    "GPT, zero": (*GPT, "strategy=zero"),
    "GPT, zero, accumulation": (*GPT, "strategy=zero", ACCUMULATED),
    "GPT, fsdp": (*GPT, "strategy=fsdp"),
    "GPT, fsdp, recomputed": (*GPT, "strategy=fsdp", RECOMPUTED),
    "GPT, fsdp, accumulation, whole": (*GPT, "strategy=fsdp", ACCUMULATED, "strategy.accumulate=whole"),
    "GPT, fsdp, accumulation, sharded": (*GPT, "strategy=fsdp", ACCUMULATED, "strategy.accumulate=sharded"),
    "GPT, fsdp, recomputed, sharded": (*GPT, "strategy=fsdp", RECOMPUTED, ACCUMULATED, "strategy.accumulate=sharded"),
    "GPT, hsdp": (*GPT, "strategy=hsdp", "cluster.nodes=2"),
    "GPT, hsdp, recomputed, accumulation": (*GPT, "strategy=hsdp", "cluster.nodes=2", RECOMPUTED, ACCUMULATED),
    "GPT, mesh, tensor=2": (*GPT, "strategy=mesh", "strategy.tensor=2"),
    "GPT, mesh, tensor=2, recomputed": (*GPT, "strategy=mesh", "strategy.tensor=2", RECOMPUTED),
    "Llama, ddp": (*LLAMA, "strategy=ddp"),
    "Llama, fsdp, recomputed": (*LLAMA, "strategy=fsdp", RECOMPUTED),
    "digits, ddp, accumulation": (*DIGITS, "strategy=ddp", ACCUMULATED),
    "digits, zero": (*DIGITS, "strategy=zero"),
}
PROCESSES = 4


def planned_and_used(settings: Settings) -> tuple[float, int]:
    """Return the bytes per rank that ``plan`` predicts, and the maximum over real processes."""
    planned = Predictor(Given(compute_seconds=1.0)).forecast(settings).cost.memory_bytes
    return planned, max(real.most for real in really(settings, RehearsedPart(steps=3), PROCESSES))


def memory() -> None:
    """Print planned and used memory, and the relative error, for each case."""
    table = Table("run of four processes", "planned MB", "used MB", "off")
    network = "cluster.links.network={bandwidth: 1e9, latency: 1e-5}"
    for name, options in CASES.items():
        planned, used = composed(planned_and_used, *options, network, f"cluster.processes={PROCESSES}")
        table.add_row(name, f"{planned / 1e6:.2f}", f"{used / 1e6:.2f}", f"{planned / used - 1:+.1%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["worlds", sizes]:
            worlds([int(size) for size in sizes.split(",")])
        case ["begin", size]:
            begin(int(size))
        case ["store", sizes]:
            store([int(size) for size in sizes.split(",")])
        case ["faults", size, strategies]:
            faults(int(size), strategies.split(","))
        case ["memory"]:
            memory()
        case _:
            sys.exit(__doc__)
