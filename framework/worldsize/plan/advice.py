"""Describes forecasts: best strategy and why, missing memory, effects of a new batch size."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from worldsize.core import Cluster, Link
from worldsize.observe.health.counters import Memory, find_memory_limit
from worldsize.plan.predictor import Forecast

_ALIKE = 1.1  # measurements may reverse the order of forecasts within this factor; see benchmarks/README.md
WANTED = 0.8  # desired efficiency
_CUDA_BYTES = 2e9  # GPU bytes unavailable to tensors: CUDA context, cuBLAS and cuDNN workspaces, NCCL buffers


def detect_memory_bytes(cluster: Cluster) -> float | None:
    """Return the bytes of GPU memory or RAM that one process here can use for tensors.

    RAM is limited by the container or job. One rank's share is reduced by the private memory of this process, since
    each rank needs as much for imports; call this before loading data. 0 if nothing remains. None if unknown: without a
    GPU, with several nodes, or for other devices.
    """
    if cluster.device == "cuda":
        return _gpu_bytes()
    if cluster.nodes > 1 or cluster.device != "cpu":
        return None
    physical = Memory(used=0, total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    share = find_memory_limit(physical).total / cluster.processes_per_node
    return max(0.0, share - _private_bytes())


def _gpu_bytes() -> float | None:
    """Return the usable bytes of the first GPU, or None without one. A subprocess queries CUDA."""
    if not torch.cuda.device_count():
        return None
    program = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return max(0.0, float(asked.stdout) - _CUDA_BYTES) if asked.returncode == 0 else None


def _private_bytes() -> int:
    """Return the anonymous memory of this process in bytes, excluding mapped files."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None, "Linux has had this field since 4.5"
    return int(match[1]) * 1024


def explain_memory_excess(forecast: Forecast, memory_bytes: float | None, *, processes: int = 1) -> str | None:
    """Explain why a rank needs more than ``memory_bytes``; None if it does not. ``processes``: number per node."""
    needed = forecast.cost.memory_bytes
    if memory_bytes is None or needed <= memory_bytes:
        return None
    if memory_bytes == 0:
        return (
            f"Python and torch use all memory of this machine with {processes} processes. Lower "
            "cluster.processes, or set cluster.device_memory."
        )
    return (
        f"out of memory: requires {size_text(needed)} per rank, found {size_text(memory_bytes)}. Shard "
        "the model over more ranks."
    )


def best_text(forecasts: Mapping[str, Forecast], unfitting: Collection[str]) -> str:
    """Describe the fastest strategy that fits in memory and is equivalent to training on a single process.

    The text includes the advantage over the next strategy, and faster strategies that do not qualify.
    """
    order = sorted(forecasts, key=lambda name: forecasts[name].step_seconds)
    fitting = [name for name in order if name not in unfitting and forecasts[name].cost.same]
    if not forecasts:
        return "No strategy could be predicted; see the reasons below."
    if not fitting and all(name in unfitting for name in order):
        return "No strategy fits in memory. Add nodes, make the model smaller, or use devices with more memory."
    if not fitting:
        rest = ", ".join(name for name in order if name not in unfitting)
        return (
            "No strategy that fits is equivalent to a single process. Approximate alternatives (compare the "
            f"loss): {rest}."
        )
    best = forecasts[fitting[0]]
    sentences = [f"Best: {fitting[0]}, {time_text(best.step_seconds)} per step."]
    if len(fitting) > 1:
        sentences.append(_compare_forecasts(best, fitting[1], forecasts[fitting[1]]))
    faster = order[: order.index(fitting[0])]
    if large := [name for name in faster if name in unfitting]:
        sentences.append(f"Faster, but out of memory: {', '.join(large)}.")
    if others := [name for name in faster if name not in unfitting]:
        sentences.append(f"Faster, but not equivalent to a single process (compare the loss): {', '.join(others)}.")
    return " ".join([*sentences, _describe_efficiency(best)])


def _compare_forecasts(best: Forecast, name: str, second: Forecast) -> str:
    if second.step_seconds < _ALIKE * best.step_seconds:
        needs = f"{size_text(second.cost.memory_bytes)} per rank instead of {size_text(best.cost.memory_bytes)}"
        return f"{name} is about as fast ({second.step_seconds / best.step_seconds - 1:.1%} slower) and needs {needs}."
    reasons = {
        f"waits {time_text(second.exposed_seconds)} for communication instead of {time_text(best.exposed_seconds)}": (
            second.exposed_seconds - best.exposed_seconds
        ),
        "has more computation outside the model": second.added_seconds - best.added_seconds,
        f"is idle {second.cost.idle:.0%} of the time": (second.cost.idle - best.cost.idle) * second.step_seconds,
        "has more computation per worker": second.compute_seconds - best.compute_seconds,
    }
    why = max(reasons, key=lambda reason: reasons[reason])
    return f"{name} is next and takes {second.step_seconds / best.step_seconds:.2f} × as long: it {why}."


def _describe_efficiency(best: Forecast) -> str:
    if best.efficiency >= WANTED:
        return f"Efficiency: {best.efficiency:.1%} of the time is compute."
    needed = best.compute_seconds_for(WANTED)
    if math.isinf(needed):
        return (
            f"Efficiency: only {best.efficiency:.1%} of the time is compute, and ranks are idle "
            f"{best.cost.idle:.0%} of the time at any batch size. Use more micro-batches (logical_ranks)."
        )
    return (
        f"Efficiency: only {best.efficiency:.1%} of the time is compute. {WANTED:.0%} requires "
        f"{time_text(needed)} of compute per step, {needed / best.compute_seconds:.1f} × as much: use a "
        "larger batch, compression (strategy.compress) or fewer ranks."
    )


def retuning_text(then: int, now: int, lr: float | None, where: str) -> str | None:
    """Warn that a new global batch needs a new learning rate; None if it is unchanged.

    The learning rate scales linearly for SGD (Goyal et al. 2017, arXiv 1706.02677), and with the square root for Adam
    (Malladi et al. 2022, arXiv 2205.10287).
    """
    if then == now:
        return None
    ratio = now / then
    return (
        f"warning: the global batch changed from {then} in {where} to {now}. Retune the learning rate of "
        f"that run: start at {ratio:.3g} × with SGD, {ratio**0.5:.3g} × with Adam (currently "
        f"{'no lr' if lr is None else f'lr={lr:g}'})."
    )


def rule_text(cluster: Mapping[str, Any]) -> str:
    """Explain that ``cluster.scale_lr`` requires ``cluster.base_batch``; empty if it is not needed."""
    rule, base = cluster["scale_lr"], cluster["base_batch"]
    if rule == "none" or base is not None:
        return ""
    return (
        f"cluster.scale_lr={rule} requires cluster.base_batch to train strategies with a fixed number of samples per "
        "update, such as ddp; the figures below do not depend on lr. Set cluster.base_batch to the batch size for "
        "which lr was tuned, or cluster.scale_lr=none for these strategies."
    )


def formula_text(forecasts: Mapping[str, Forecast]) -> str:
    """Explain which memory estimates come from a strategy's own formula, and why."""
    reasons: dict[str, list[str]] = {}
    for name, each in forecasts.items():
        if each.by_formula:
            reasons.setdefault(each.by_formula, []).append(name)
    explained = "; ".join(f"{', '.join(names)}: {why.rstrip('.')}" for why, names in reasons.items())
    return f"* Memory estimated by the strategy's formula, without activations. {explained}." if explained else ""


def links_text(cluster: Cluster, file: Path | None) -> str:
    """Format a cluster's links by tier; ``file``: report with the measured links, None if declared."""
    tiers = {tier: f"{size_text(link.bandwidth)}/s, {1e6 * link.latency:g} µs" for tier, link in cluster.links.items()}
    origin = f"measured, {file}" if file else f"declared by cluster={cluster.name}"
    return f"Links ({origin}): {'; '.join(f'{tier} {text}' for tier, text in tiers.items())}."


def assumed_overlap_text() -> str:
    return (
        "Assumed: overlap=0%, i.e. ranks wait for all communication. Pass e.g. --overlap 0.6 if communication can "
        "run during 60% of the compute."
    )


def assumed_precision_text(precision: str, element_bytes: int) -> str:
    return (
        f"Assumed: precision={precision}, {element_bytes} bytes per value. Pass e.g. --precision bf16 if gradients "
        "are sent in bf16."
    )


def assumed_link_text(tier: str, link: Link, file: Path) -> str:
    """Explain that a link's bandwidth is an assumption, and how to replace it; ``file``: its source."""
    owner, total = (
        ("node", "the total bandwidth of a node's NICs")
        if tier == "network"
        else ("process", "the bandwidth between processes of a node")
    )
    return (
        f"Assumed: {tier} bandwidth={size_text(link.bandwidth)}/s per {owner} ({file}). Set "
        f"cluster.links.{tier}.bandwidth to {total}, or measure it: worldsize doctor --json FILE, then --links FILE."
    )


def price_per_million(forecast: Forecast, batch_size: int, price_per_hour: float) -> float:
    """Return the price of a million samples, given the price of all nodes per hour."""
    return forecast.step_seconds / 3600 * price_per_hour / batch_size * 1e6


def size_text(count: float) -> str:
    """Format bytes in decimal units with two decimals: 1 kB is 1000 B."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def time_text(seconds: float) -> str:
    """Format seconds, in milliseconds below 10 s; infinity is "never"."""
    if math.isinf(seconds):
        return "never"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:.2f} ms"
