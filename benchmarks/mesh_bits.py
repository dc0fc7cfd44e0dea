"""Digests of one training under every shape of a mesh, and the time of a step in logical slices.

uv run python benchmarks/mesh_bits.py digests 50   # 41 layouts with up to 8 gloo processes, 50 steps each
uv run python benchmarks/mesh_bits.py digests 50 13 # without the first 13 of them
uv run python benchmarks/mesh_bits.py steps 10     # a step with and without slices, medians of 10 alternating steps
uv run python benchmarks/mesh_bits.py context 10   # a step and the memory of ranks that share each sequence
uv run python benchmarks/mesh_bits.py schedules 10 # a step with each schedule of a pipeline
uv run python benchmarks/mesh_bits.py tokens 10    # a step and the activations of ranks that divide tokens
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))

from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.collectives.cost import bubble_share
from worldsize.collectives.gather_full import gather_full
from worldsize.core import Cluster, MicroBatch, Numerics, RunContext, Strategy, World
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.schedule import KINDS, PipelineSchedule
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

LOGICAL, CONTEXT = 8, 64
Split = tuple[Tensor, Tensor]


def _recipe(width: int, depth: int, dropout: float) -> StdlibLM:
    optimizer = partial(torch.optim.AdamW, lr=0.001)
    return StdlibLM(width, depth, 8, CONTEXT, dropout, test_bytes=1000, make_optimizer=optimizer)


def _draw_rows(step: int) -> Split:
    rows = torch.randint(256, (2 * LOGICAL, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


def _split_batch(step: int, rank: int, size: int) -> Sequence[MicroBatch]:
    """Return the micro-batches of data-parallel rank ``rank`` of ``size``."""
    parts = zip(*(each.chunk(LOGICAL) for each in _draw_rows(step)), strict=True)
    return [MicroBatch(part, seed=100 * step + place) for place, part in enumerate(parts)][rank::size]


def _train(strategy: Strategy, steps: int, world: World) -> str:
    """Train for ``steps`` steps; return the digest of the final weights on rank 0."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    numerics = Numerics(clip_norm=0.5, logical_tensor=LOGICAL, logical_context=LOGICAL)
    replica = strategy.replica(_recipe(128, 8, 0.1), RunContext(world, numerics, logical_ranks=LOGICAL))
    size = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    for step in range(steps):
        replica.step(_split_batch(step, strategy.data_rank(world), size))
    weights = gather_full(replica.state()["model"], world)
    return state_digest(tensor_digests({name: each.clone() for name, each in weights.items()}))


def list_layouts() -> list[tuple[str, Strategy, int]]:
    """Return the name, strategy and number of processes of each layout with at most 8 processes."""
    layouts: list[tuple[str, Strategy, int]] = [("single", Single(reduce="ordered"), 1)]
    for size in (2, 4, 8):
        layouts += [(f"ddp {size}", DDP(reduce="ordered"), size), (f"fsdp {size}", FSDP(reduce="ordered"), size)]
    for data, context, tensor, pipeline in product((1, 2, 4, 8), repeat=4):
        if 1 < (size := data * context * tensor * pipeline) <= 8:
            mesh = Mesh(reduce="ordered", data=data, context=context, tensor=tensor, pipeline=pipeline)
            layouts.append((f"mesh {data} × {context} × {tensor} × {pipeline}", mesh, size))
    return layouts


def show_digests(steps: int, first: int = 0) -> None:
    """Print the digest of each layout from number ``first``, counted from 0."""
    table = Table("layout (data × context × tensor × pipeline)", "processes", "state", title=f"{steps} steps")
    digests = set()
    progress = Console(stderr=True)
    for name, strategy, size in track(list_layouts()[first:], console=progress):
        digest = run_in_worlds(partial(_train, strategy, steps), size, timeout=7200)[0]
        digests.add(digest)
        progress.print(f"{name}: {digest[:16]}")
        table.add_row(name, str(size), digest[:16])
    Console().print(table, f"{len(digests)} different digests")


def _time_steps(
    variants: Sequence[tuple[Strategy, Numerics]], width: int, depth: int, steps: int, world: World
) -> list[float]:
    """Return the median seconds of a step of each variant; steps alternate."""
    replicas = []
    for strategy, numerics in variants:
        torch.manual_seed(5)
        context = RunContext(world, numerics, logical_ranks=LOGICAL)
        replicas.append(strategy.replica(_recipe(width, depth, 0.0), context))
    seconds: list[list[float]] = [[] for _ in variants]
    for step in range(steps + 2):
        batch = _split_batch(step, 0, 1)
        for replica, times in zip(replicas, seconds, strict=True):
            if world.group is not None:
                dist.barrier()
            begun = time.perf_counter()
            replica.step(batch)
            times.append(time.perf_counter() - begun)
    return [statistics.median(times[2:]) for times in seconds]


def show_steps(steps: int) -> None:
    """Print the time of a step with and without slices."""
    whole, eight = Numerics(), Numerics(logical_tensor=8)
    single = Single(reduce="ordered")
    table = Table("model", "layout", "layers", "ms per step", title=f"medians of {steps} alternating steps")
    for width, depth in ((128, 4), (1024, 2)):
        variants = [(single, whole), (single, eight)]
        times = run_in_worlds(partial(_time_steps, variants, width, depth, steps), 1, timeout=900)[0]
        for name, each in zip(("whole", "8 slices"), times, strict=True):
            table.add_row(f"width {width}", "single", name, f"{each * 1e3:.0f} ({each / times[0]:.2f} ×)")
    for size in (2, 4):
        sliced = Numerics(logical_tensor=size)
        meshes = [(Mesh(tensor=size), whole), (Mesh(tensor=size, reduce="ordered"), sliced)]
        times = run_in_worlds(partial(_time_steps, meshes, 256, 4, steps), size, timeout=900)[0]
        for name, each in zip(("flat sums", f"{size} slices"), times, strict=True):
            table.add_row("width 256", f"mesh, tensor={size}", name, f"{each * 1e3:.0f} ({each / times[0]:.2f} ×)")
    Console().print(table)


def show_schedules(steps: int) -> None:
    """Print the time of a step with each schedule on two pipeline ranks, and its idle fraction in theory."""
    meshes = [Mesh(pipeline=2, schedule=kind) for kind in KINDS]
    variants = [(mesh, Numerics()) for mesh in meshes]
    times = run_in_worlds(partial(_time_steps, variants, 512, 8, steps), 2, timeout=900)[0]
    table = Table("schedule", "idle", "ms per step", title=f"{LOGICAL} micro-batches, medians of {steps} steps")
    for mesh, each in zip(meshes, times, strict=True):
        plan = PipelineSchedule(2, mesh.schedule, None, None)
        idle = bubble_share(2, LOGICAL, plan.stages // 2, splits_backward=plan.splits_backward)
        table.add_row(mesh.schedule, f"{idle:.1%}", f"{each * 1e3:.0f} ({each / times[0]:.2f} ×)")
    Console().print(table)


def _time_tokens(meshes: Sequence[Mesh], numerics: Numerics, steps: int, world: World) -> list[tuple[float, float]]:
    """Return the median seconds of a step of each mesh, and the MB of activations saved by autograd."""
    optimizer = partial(torch.optim.AdamW, lr=0.001)
    recipe = StdlibLM(512, 4, 8, 512, 0.1, test_bytes=1000, make_optimizer=optimizer)
    rows = torch.randint(256, (4, 513), generator=torch.Generator().manual_seed(1))
    batch = [MicroBatch((rows[:, :-1], rows[:, 1:]), seed=1)]
    replicas = [strategy.replica(recipe, RunContext(world, numerics, logical_ranks=1)) for strategy in meshes]
    saved = [_count_saved_bytes(partial(replica.step, batch)) / 1e6 for replica in replicas]
    seconds: list[list[float]] = [[] for _ in replicas]
    for _ in range(steps):
        for replica, times in zip(replicas, seconds, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            replica.step(batch)
            times.append(time.perf_counter() - begun)
    return [(statistics.median(times), each) for times, each in zip(seconds, saved, strict=True)]


def _count_saved_bytes(step: Callable[[], object]) -> int:
    """Return the bytes that autograd saves for the backward pass of ``step``, without parameters."""
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # kept alive, so that no two have the same address

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            kept.append(tensor)
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(sizes.values())


def show_tokens(steps: int) -> None:
    """Print the time of a step, and the activations of a rank, with and without sequence parallelism."""
    title = f"width 512, 4 layers, 4 × 512 tokens, medians of {steps} alternating steps"
    table = Table("tensor", "reduce", "sequence_parallel", "ms per step", "MB of activations", title=title)
    for size in (2, 4):
        for reduce in ("flat", "ordered"):
            numerics = Numerics(logical_tensor=size if reduce == "ordered" else 1)
            meshes = [Mesh(tensor=size, reduce=reduce, sequence_parallel=each) for each in (False, True)]
            found = run_in_worlds(partial(_time_tokens, meshes, numerics, steps), size, timeout=900)[0]
            for mesh, (seconds, saved) in zip(meshes, found, strict=True):
                shown = f"{seconds * 1e3:.0f} ({seconds / found[0][0]:.2f} ×)"
                table.add_row(str(size), reduce, str(mesh.sequence_parallel).lower(), shown, f"{saved:.0f}")
    Console().print(table)


def _step_by_hand(recipe: StdlibLM, world: World) -> Callable[[Split], None]:
    """Return a hand-written DDP step: ranks have one chunk per sequence, and gather keys and values in each layer."""
    torch.manual_seed(5)
    model = DistributedDataParallel(recipe.model()) if world.size > 1 else recipe.model()
    optimizer = recipe.optimizer(model)
    plain = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        if world.group is None:
            return plain(query, key, value, is_causal=is_causal)
        whole = [all_gather_single_autograd(each.contiguous(), 2, world.group) for each in (key, value)]
        length = query.shape[2]
        first, last = world.rank * length, (world.rank + 1) * length
        mask = torch.ones(length, last, dtype=torch.bool).tril(first)
        return plain(query, whole[0][:, :, :last], whole[1][:, :, :last], attn_mask=mask)

    def step(batch: Split) -> None:
        own = [each.chunk(world.size, dim=1)[world.rank] for each in batch]
        optimizer.zero_grad()
        F.scaled_dot_product_attention = attend  # type: ignore[assignment]
        try:
            total, count = recipe.loss(model, own)
            (total / count).backward()  # type: ignore[no-untyped-call]
        finally:
            F.scaled_dot_product_attention = plain
        optimizer.step()

    return step


def _time_context(length: int, steps: int, loops: Sequence[str], world: World) -> list[tuple[float, float]]:
    """Return the median seconds and peak memory in MB per step, for each of ``loops``; steps alternate."""
    optimizer = partial(torch.optim.AdamW, lr=0.001)
    recipe = StdlibLM(256, 4, 8, length, 0.0, test_bytes=1000, make_optimizer=optimizer)
    rows = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(1))
    batch = rows[:, :-1], rows[:, 1:]
    runs: list[Callable[[], object]] = []
    for loop in loops:
        if loop == "by hand":
            runs.append(partial(_step_by_hand(recipe, world), batch))
            continue
        torch.manual_seed(5)
        strategy = Mesh(context=world.size, data=1) if world.size > 1 else Single()
        replica = strategy.replica(recipe, RunContext(world, Numerics(), logical_ranks=1))
        runs.append(partial(replica.step, [MicroBatch(batch, seed=1)]))
    seconds: list[list[float]] = [[] for _ in runs]
    peaks = [0.0 for _ in runs]
    for _ in range(steps):
        for index, run in enumerate(runs):
            if world.group is not None:
                dist.barrier()
            with _MemoryPeak() as peak:
                begun = time.perf_counter()
                run()
                seconds[index].append(time.perf_counter() - begun)
            peaks[index] = max(peaks[index], peak.grown)
    return [(statistics.median(times), peak) for times, peak in zip(seconds, peaks, strict=True)]


class _MemoryPeak:
    """Measures the peak memory growth of the process within the block, in MB, by sampling every 5 ms."""

    def __init__(self) -> None:
        self.grown = 0.0
        self._process, self._ended = psutil.Process(), threading.Event()

    def __enter__(self) -> _MemoryPeak:
        self._first = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.grown = max(self.grown, (self._process.memory_info().rss - self._first) / 1e6)


def show_context(steps: int) -> None:
    """Print the time of a step with sequences divided over ranks, and the memory, measured in a new process."""
    length, loops = 4096, ("by hand", "worldsize")
    table = Table("ranks", "loop", "ms per step", "MB", title=f"one sequence of {length} bytes, {steps} steps")
    for size in (1, 2, 4):
        times = run_in_worlds(partial(_time_context, length, steps, loops), size, timeout=900)
        base = max(rank[0][0] for rank in times)
        for index, loop in enumerate(loops):
            alone = run_in_worlds(partial(_time_context, length, 1, [loop]), size, timeout=900)
            slowest, most = max(rank[index][0] for rank in times), max(rank[0][1] for rank in alone)
            table.add_row(str(size), loop, f"{slowest * 1e3:.0f} ({slowest / base:.2f} ×)", f"{most:.0f}")
    Console().print(table)


if __name__ == "__main__":
    shows = {"digests": show_digests, "steps": show_steps, "context": show_context, "schedules": show_schedules}
    shows |= {"tokens": show_tokens}
    shows[sys.argv[1]](*map(int, sys.argv[2:]))
