"""Compare a run on one GPU with a hand-written loop, Lightning Fabric and Accelerate: GPT, 124 M parameters, bfloat16.

    python benchmarks/gpu.py            # on a GPU
    python benchmarks/gpu.py --tiny     # a smoke test of the same code, on the CPU

Each contender runs in a separate process, with the same model, data and optimizer, eager and compiled. The table has
tokens per second (median of the last half of the steps), the peak of torch's allocator (on the CPU: of resident memory)
next to worldsize's prediction, and the last loss. Peers that are not installed are listed as such.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from worldsize.collectives.cluster_cost import whole_bytes
from worldsize.core import Numerics, Recipe, RunContext, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.plan.calibrate import calibrate
from worldsize.strategies.single import Single


@dataclass(frozen=True)
class Sizes:
    """Model dimensions, batch size and number of steps."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50_304  # GPT-2's, rounded up to a multiple of 64
    batch: int = 16
    steps: int = 40


TINY = Sizes(width=32, depth=2, heads=2, context=32, vocabulary=256, batch=4, steps=6)


class Block(nn.Module):
    """A GPT-2 block: pre-norm attention and MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden_btw: Tensor) -> Tensor:
        batch, length, width = hidden_btw.shape
        parts = self.inputs(self.norm(hidden_btw)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden_btw = hidden_btw + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        wider: Tensor = self.down(F.gelu(self.up(self.other_norm(hidden_btw))))
        return hidden_btw + wider


class GPT(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(sizes.vocabulary, sizes.width),
            nn.Embedding(sizes.context, sizes.width),
        )
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        hidden = self.tokens(tokens_bt) + self.places.weight[: tokens_bt.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)


@dataclass(frozen=True)
class RandomTokens(Recipe):
    """Train the GPT on random tokens."""

    sizes: Sizes

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(self.sizes)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def data(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        count, context = 8 * self.sizes.batch, self.sizes.context + 1
        return TensorDataset(torch.randint(self.sizes.vocabulary, (count, context), generator=generator))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.blocks) if isinstance(model, GPT) else []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens_bt = batch[0]
        logits = model(tokens_bt[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens_bt[:, 1:].flatten())

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


Step = Callable[[], float]
Contender = Callable[[RandomTokens, torch.device, Numerics], Iterator[Step]]


def by_hand(recipe: RandomTokens, device: torch.device, numerics: Numerics) -> Iterator[Step]:
    """Yield the step function of a hand-written loop in plain PyTorch."""
    model = recipe.model().to(device)
    called: Any = torch.compile(model) if numerics.compile else model
    (data,), on_gpu = recipe.data("train").tensors, device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=on_gpu)

    def step() -> float:
        rows = data[torch.randint(len(data), (recipe.sizes.batch,))]  # a copy in unpinned memory
        tokens = (rows.pin_memory() if on_gpu else rows).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = recipe.loss(called, [tokens])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    while True:
        yield step


def by_worldsize(recipe: RandomTokens, device: torch.device, numerics: Numerics) -> Iterator[Step]:
    """Yield step functions of worldsize, whose loader prefetches to the device."""
    replica = Single().replica(recipe, RunContext(World.create_single(device), numerics))
    batches = micro_batches(recipe.data("train"), Order(0, recipe.sizes.batch, 1, (0,)), device)
    while True:
        yield lambda: float(replica.step(next(batches)).losses[0])


def by_fabric(recipe: RandomTokens, device: torch.device, numerics: Numerics) -> Iterator[Step]:
    """Yield the step function of a loop with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    network, optimizer = made(recipe, numerics)
    model, optimizer = fabric.setup(network, optimizer)
    batches = fabric.setup_dataloaders(loader(recipe, device))
    return steps(lambda batch: recipe.loss(model, batch), optimizer, batches, fabric.backward)


def by_accelerate(recipe: RandomTokens, device: torch.device, numerics: Numerics) -> Iterator[Step]:
    """Yield the step function of a loop with Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    network, optimizer = made(recipe, numerics)
    model, optimizer, batches = accelerator.prepare(network, optimizer, loader(recipe, device))

    def loss_of(batch: Any) -> Tensor:
        with accelerator.autocast():
            return recipe.loss(model, batch)

    return steps(loss_of, optimizer, batches, accelerator.backward)


def made(recipe: RandomTokens, numerics: Numerics) -> tuple[Any, Optimizer]:
    """Create the model, compiled if ``numerics.compile``, and its optimizer."""
    network = recipe.model()
    return torch.compile(network) if numerics.compile else network, recipe.optimizer(network)


def steps(
    loss_of: Callable[[Any], Tensor], optimizer: Any, batches: Iterable[Any], backward: Callable[[Tensor], Any]
) -> Iterator[Step]:
    """Yield a function that takes a step of the loop in both peers' documentation, and returns the loss."""
    endless_batches = endless(batches)

    def step() -> float:
        loss = loss_of(next(endless_batches))
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        return float(loss.detach())

    while True:
        yield step


def loader(recipe: RandomTokens, device: torch.device) -> DataLoader[Any]:
    """Create the DataLoader that both peers' documentation uses."""
    data, on_gpu = recipe.data("train"), device.type == "cuda"
    return DataLoader(data, batch_size=recipe.sizes.batch, shuffle=True, drop_last=True, pin_memory=on_gpu)


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of ``batches``, starting over at the end."""
    while True:
        yield from batches


CONTENDERS: Mapping[str, Contender] = {
    "by hand": by_hand,
    "worldsize": by_worldsize,
    "Lightning Fabric": by_fabric,
    "Accelerate": by_accelerate,
}


def measured(name: str, sizes: Sizes, kind: str, numerics: Numerics) -> tuple[float, float, float]:
    """Measure a contender; return tokens per second, peak bytes and the last loss."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    seconds, loss = [], 0.0
    for number, step in enumerate(CONTENDERS[name](RandomTokens(sizes), device, numerics), 1):
        begun = time.perf_counter()
        loss = step()  # float() waits for the device
        seconds.append(time.perf_counter() - begun)
        if number == sizes.steps:
            break
    tokens = sizes.batch * sizes.context / statistics.median(seconds[sizes.steps // 2 :])
    if kind == "cuda":
        return tokens, torch.cuda.max_memory_allocated(), loss
    return tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    tiny = parser.parse_args().tiny
    sizes, kind = (TINY, "cpu") if tiny else (Sizes(), "cuda")
    choices = {
        "eager": Numerics(precision="bf16"),
        "compiled": Numerics(precision="bf16", compile=True),
        "recomputed": Numerics(precision="bf16", activation_checkpointing="full"),
    }
    print("| | tokens/s | peak memory | predicted | last loss |\n|---|---|---|---|---|")
    for how, numerics in choices.items():
        # calibration forks, so this process must not have used CUDA
        work = calibrate(RandomTokens(sizes), numerics, Order(0, sizes.batch, 1, (0,)), kind)
        for name in CONTENDERS if how != "recomputed" else ("worldsize",):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    tokens, peak, loss = pool.submit(measured, name, sizes, kind, numerics).result()
                except ImportError as error:
                    print(f"| {name}, {how} | not installed: {error} | | | |", flush=True)
                    continue
            predicted = f"{whole_bytes(work) / 1e6:,.0f} MB" if name == "worldsize" else ""
            print(f"| {name}, {how} | {tokens:,.0f} | {peak / 1e6:,.0f} MB | {predicted} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
