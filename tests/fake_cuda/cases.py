"""The runs that the tests take through a step on fake CUDA tensors, and the waits that are theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMMON = ("batch_size=16", "evaluate_batch_size=16", "cluster.processes=2", "cluster.device=cuda")
RECIPES = {
    "gpt": (
        "recipe=stdlib_lm",
        *("recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=16", "recipe.test_bytes=1000"),
    ),
    "digits": ("recipe=digits", "evaluate_batch_size=360"),
}
SHORT = {
    "NODES": ["cluster.processes=4", "cluster.nodes=2"],
    "OFFLOAD": ["strategy.cpu_offload=true", 'cluster.backend="cpu:gloo,cuda:nccl"'],
}
# strategy | mode, precision, micro-batches of a process, clip_norm, recipe | further words
CASES = """
strategy=single cluster.processes=1 | seeded fp32 1 null digits | nonfinite=skip
strategy=single cluster.processes=1 | elastic bf16 2 1.0 gpt | ema.decay=0.9
strategy=ddp | seeded bf16 1 null gpt | optimizer=muon
strategy=ddp | deterministic fp16 2 1.0 digits | nonfinite=skip
strategy=ddp | elastic fp32 1 1.0 gpt | ema.decay=0.9
strategy=ddp strategy.compress=int8 | seeded fp16 2 null digits |
strategy=ddp strategy.compress=topk | deterministic bf16 1 1.0 digits |
strategy=ddp strategy.compress=randomk | seeded fp32 2 1.0 gpt |
strategy=ddp strategy.reduce=hierarchical NODES | deterministic fp32 1 null gpt |
strategy=zero | elastic fp16 1 null gpt | recipe.dropout=0.1
strategy=zero | deterministic bf16 2 1.0 digits | optimizer=sgd
strategy=fsdp | seeded fp16 1 1.0 gpt | ema.decay=0.9
strategy=fsdp strategy.accumulate=sharded | elastic fp32 2 null digits |
strategy=fsdp strategy.param_dtype=bf16 | deterministic fp32 2 null gpt | optimizer=sgd
strategy=fsdp OFFLOAD | seeded bf16 2 1.0 gpt |
strategy=fsdp OFFLOAD | elastic fp32 1 1.0 gpt |
strategy=hsdp NODES | deterministic bf16 1 null gpt |
strategy=mesh | elastic bf16 1 1.0 digits | nonfinite=skip
strategy=mesh strategy.tensor=2 NODES | seeded fp32 1 null gpt |
strategy=local_sgd strategy.inner_steps=2 | seeded fp16 1 1.0 digits |
strategy=local_sgd strategy.inner_steps=2 strategy.optimizer_state=mean | deterministic fp32 2 null gpt |
strategy=diloco strategy.inner_steps=2 | seeded bf16 2 null gpt |
strategy=streaming_diloco strategy.inner_steps=4 strategy.fragment_blocks=1 | seeded bf16 1 1.0 gpt |
"""
ABSENT = {
    "easgd": "its centre is another process, which a launcher starts",
    "parameter_server": "refused on CUDA",
    "hybrid_parameter_server": "refused on CUDA",
}


@dataclass(frozen=True)
class Case:
    """One run."""

    strategy: Sequence[str]
    options: Sequence[str]  # mode, precision, micro-batches, clip_norm, recipe
    more: Sequence[str]

    @staticmethod
    def parsed(line: str) -> Case:
        """Read a line of CASES."""
        strategy, options, more = (part.split() for part in line.split("|"))
        return Case([word for each in strategy for word in SHORT.get(each, [each])], options, more)

    @property
    def words(self) -> list[str]:
        """Return the words of the command line."""
        mode, precision, each, clip, recipe = self.options
        chosen = {word.partition("=")[0]: word for word in [*COMMON, *RECIPES[recipe], *self.strategy]}
        parts = int(chosen["cluster.processes"][-1]) // (2 if "strategy.tensor=2" in chosen.values() else 1)
        options = {"reproducibility": mode, "precision": precision, "clip_norm": clip}
        own = [f"{key}={value}" for key, value in options.items()]
        return [*chosen.values(), *own, f"logical_ranks={int(each) * parts}", *self.more]


def cases() -> list[Case]:
    """Return all runs."""
    return [Case.parsed(line) for line in CASES.strip().splitlines()]


_SKIPS = "nonfinite=skip: the host decides whether to take the step"
_SCALES = "precision=fp16: torch's GradScaler decides on the host whether to take the step"
_STATE = "the state of torch's GradScaler is plain numbers"
_COUNTS = "an optimizer's counts of steps are on the host, and are averaged once a round"
_METRICS = "collectives/exact.py reduce_metrics of metrics/collector.py MetricCollector.reduce"
_GATHERED = "a logged line waits once for all its numbers"
_MESH = "ranks of a part of a mesh have no group of gloo"
_OFFLOADED = "cpu_offload: the gradient is on the host before the optimizer is"
# by phase and function: most waits of a run, which has 2 first steps, 2 others and 3 logged lines, and their reason
ALLOWED: Mapping[tuple[str, str], tuple[int, str]] = {
    ("first steps", "core/numerics.py Numerics.skips"): (2, _SKIPS),
    ("step", "core/numerics.py Numerics.skips"): (2, _SKIPS),
    ("first steps", "strategies/loss_scaling.py step_scaled"): (2, _SCALES),
    ("step", "strategies/loss_scaling.py step_scaled"): (2, _SCALES),
    ("first steps", "strategies/unit_order.py UnitOrder._agrees_at_once"): (99, "ranks compare their first step"),
    ("loop", "collectives/exact.py start_all_gather.result of engine/window.py LoggedStep.event"): (3, _GATHERED),
    ("loop", "engine/window.py LoggedStep.event"): (3, _GATHERED),
    ("evaluation", f"collectives/exact.py _on_host of {_METRICS}"): (2, "metrics are compared on the host"),
    ("evaluation", f"collectives/exact.py start_all_reduce.result of {_METRICS}"): (1, _MESH),
    (
        "first steps",
        "collectives/exact.py start_all_gather.result of strategies/agreed_losses.py AgreedLosses._exchange",
    ): (
        1,
        _MESH,
    ),
    ("first steps", "strategies/periodic/exchange.py beside"): (1, _COUNTS),
    ("step", "strategies/periodic/exchange.py beside"): (1, _COUNTS),
    ("save", "strategies/periodic/exchange.py beside"): (1, _COUNTS),
    ("load", "strategies/periodic/exchange.py beside"): (1, _COUNTS),
    ("save", "strategies/periodic/replica.py PeriodicSyncReplica._of_first.<dictcomp>"): (2, _STATE),
    ("load", "strategies/periodic/replica.py PeriodicSyncReplica._of_first.<dictcomp>"): (2, _STATE),
    ("save", "strategies/periodic/replica.py _with_figures.<dictcomp>"): (2, _STATE),
    ("load", "strategies/periodic/replica.py _with_figures.<dictcomp>"): (2, _STATE),
    ("first steps", "strategies/loss_weights.py scale_gradients"): (2, _OFFLOADED),
    ("step", "strategies/loss_weights.py scale_gradients"): (2, _OFFLOADED),
    ("first steps", "strategies/unit_gradients.py _complete_last.complete"): (28, _OFFLOADED),
    ("step", "strategies/unit_gradients.py _complete_last.complete"): (28, _OFFLOADED),
    ("save", "strategies/model_replica.py ModelReplica.state"): (2, _STATE),
    ("load", "strategies/model_replica.py ModelReplica.state"): (2, _STATE),
}
