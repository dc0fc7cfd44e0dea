"""Runs that the tests take through a step on fake CUDA tensors, and their expected waits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMMON = ("batch_size=16", "evaluate_batch_size=16", "cluster.processes=2", "cluster.device=cuda")
NORMS = "tests.fake_cuda.norms.Norms"
RECIPES = {
    "gpt": (
        "recipe=stdlib_lm",
        *("recipe.width=16", "recipe.depth=2", "recipe.heads=2", "recipe.context=16", "recipe.test_bytes=1000"),
    ),
    "norms": ("recipe=digits", f"recipe._target_={NORMS}", f"allow_targets=[{NORMS}]", "evaluate_batch_size=360"),
}
SHORT = {
    "NODES": ["cluster.processes=4", "cluster.nodes=2"],
    "OFFLOAD": ["strategy.cpu_offload=true", 'cluster.backend="cpu:gloo,cuda:nccl"'],
}
# strategy | mode, precision, micro-batches of a process, clip_norm, recipe | further words
CASES = """
strategy=single cluster.processes=1 | fast fp32 1 null norms | nonfinite=skip
strategy=single cluster.processes=1 | elastic bf16 2 1.0 gpt | ema.decay=0.9
strategy=ddp | seeded bf16 1 null gpt | optimizer=muon precision=fp8
strategy=ddp | deterministic fp16 2 1.0 norms | nonfinite=skip
strategy=ddp | elastic fp32 1 1.0 gpt | ema.decay=0.9
strategy=ddp strategy.compress=int8 | fast fp16 2 null norms |
strategy=ddp strategy.compress=topk | deterministic bf16 1 1.0 norms |
strategy=ddp strategy.compress=randomk | seeded fp32 2 1.0 gpt |
strategy=ddp strategy.reduce=hierarchical NODES | deterministic fp32 1 null gpt |
strategy=zero | elastic fp16 1 null gpt | recipe.dropout=0.1
strategy=zero | deterministic bf16 2 1.0 norms | optimizer=sgd
strategy=fsdp | seeded fp16 1 1.0 gpt | ema.decay=0.9 optimizer.fused=true
strategy=fsdp strategy.accumulate=sharded | elastic fp32 2 null norms |
strategy=fsdp strategy.param_dtype=bf16 | deterministic fp32 2 null gpt | optimizer=sgd
strategy=fsdp OFFLOAD | seeded bf16 2 1.0 gpt |
strategy=fsdp OFFLOAD | elastic fp32 1 1.0 gpt |
strategy=hsdp NODES | deterministic bf16 1 null gpt |
strategy=mesh | elastic bf16 1 1.0 norms | nonfinite=skip
strategy=mesh strategy.tensor=2 NODES | seeded fp32 1 null gpt | optimizer.fused=true
strategy=local_sgd strategy.inner_steps=2 | seeded fp16 1 1.0 norms |
strategy=local_sgd strategy.inner_steps=2 strategy.optimizer_state=mean | deterministic fp32 2 null gpt |
strategy=diloco strategy.inner_steps=2 | seeded bf16 2 null gpt |
strategy=streaming_diloco strategy.inner_steps=4 strategy.fragment_blocks=1 | fast bf16 1 1.0 gpt |
"""
ABSENT = {
    "easgd": "its centre is another process, which a launcher starts",
    "parameter_server": "refused on CUDA",
    "hybrid_parameter_server": "refused on CUDA",
}


@dataclass(frozen=True)
class Case:
    """One run."""

    line: str
    strategy: Sequence[str]
    options: Sequence[str]  # mode, precision, micro-batches, clip_norm, recipe
    more: Sequence[str]

    @staticmethod
    def parsed(line: str) -> Case:
        """Read a line of CASES."""
        strategy, options, more = (part.split() for part in line.split("|"))
        return Case(line, [word for each in strategy for word in SHORT.get(each, [each])], options, more)

    @property
    def words(self) -> list[str]:
        """Return the words of the command line."""
        mode, precision, each, clip, recipe = self.options
        chosen = {word.partition("=")[0]: word for word in [*COMMON, *RECIPES[recipe], *self.strategy]}
        parts = int(chosen["cluster.processes"][-1]) // (2 if "strategy.tensor=2" in chosen.values() else 1)
        options = {"reproducibility": mode, "precision": precision, "clip_norm": clip}
        own = [f"{key}={value}" for key, value in options.items()]
        return [*chosen.values(), *own, f"logical_ranks={int(each) * parts}", *self.more]

    def waits(self) -> dict[tuple[str, str, str], int]:
        """Return the run's number of waits, by phase, function and kind of wait."""
        found: dict[tuple[str, str, str], int] = {}
        for wait in WAITS:
            if re.search(wait.line, self.line):
                for phase, count in wait.counts.items():
                    place = (phase, wait.function, wait.kind)
                    assert place not in found, f"{place} stands twice in WAITS for {self.line}"
                    found[place] = count
        return found


def cases() -> list[Case]:
    """Return all runs."""
    return [Case.parsed(line) for line in CASES.strip().splitlines()]


@dataclass(frozen=True)
class Wait:
    """The waits of a function in the cases whose line in CASES matches, by phase, and why they must be."""

    line: str
    function: str
    kind: str
    counts: Mapping[str, int]
    why: str


# a run has 2 first steps, 2 other steps, 3 logged lines, an evaluation, a save and a load
_STEPS, _STATE = {"first steps": 2, "step": 2}, {"save": 2, "load": 2}
_METRICS = "collectives/exact.py reduce_metrics of metrics.py MetricCollector.reduce"
_AGREES = "strategies/unit_collectives.py UnitOrder._agrees_at_once"
_GATHERED = "collectives/exact.py start_all_gather.wait_for_parts of"
_TO_HOST, _FROM_HOST = "copy to the host", "copy from the host"
_LOGGED = "a logged line waits once for all its numbers"
_MESH = "ranks of a part of a mesh have no group of gloo"
_SCALER = "the state of torch's GradScaler is plain numbers"
_COUNTS = "an optimizer's counts of steps are on the host, and are averaged once a round"
_OFFLOADED = "cpu_offload: the gradient is on the host before the optimizer is"
_BUFFERS = "the host compares buffers without a rule in steps 1, 2 and 4"
_COMPARED = {  # ranks compare their first step, pass by pass, by recipe and micro-batches
    ("gpt", 1): 11,
    ("gpt", 2): 18,
    ("norms", 1): 5,
    ("norms", 2): 9,
}
WAITS = (
    Wait(
        "", f"collectives/exact.py _stack_on_host of {_METRICS}", _TO_HOST, {"evaluation": 1}, "metrics are of the host"
    ),
    Wait("^strategy=single ", "loop/window.py LoggedStep.create_event", _TO_HOST, {"loop": 3}, _LOGGED),
    Wait(
        "^strategy=(?!single )", f"{_GATHERED} loop/window.py LoggedStep.create_event", _TO_HOST, {"loop": 3}, _LOGGED
    ),
    Wait(
        "nonfinite=skip",
        "core/numerics.py Numerics.should_skip_update",
        "item",
        _STEPS,
        "the host decides whether to take it",
    ),
    # a fused step decides on the device
    Wait(
        r" fp16 (?!.*fused)", "strategies/loss_scaling.py step_scaled", "item", _STEPS, "GradScaler decides on the host"
    ),
    Wait(" fp16 ", "strategies/model_replica.py ModelReplica.state", "item", _STATE, _SCALER),
    Wait(
        "^strategy=local_sgd .* fp16 ",
        "strategies/periodic.py _merge_figures.<dictcomp>",
        "item",
        _STATE,
        _SCALER,
    ),
    Wait(
        "^strategy=local_sgd .* fp16 ",
        "strategies/periodic.py PeriodicSyncReplica._broadcast_figures.<dictcomp>",
        _FROM_HOST,
        _STATE,
        _SCALER,
    ),
    Wait(
        "local_sgd |diloco ",
        "strategies/periodic_exchange.py move_means_to_host",
        _TO_HOST,
        {"save": 1, "load": 1},
        _COUNTS,
    ),
    Wait(
        "optimizer_state=mean",
        "strategies/periodic_exchange.py move_means_to_host",
        _TO_HOST,
        {"first steps": 1, "step": 1},
        _COUNTS,
    ),
    Wait(
        "^strategy=(?!single |local_sgd ).* norms ",
        "strategies/buffer_combinations.py _Equal.write_buffers",
        "equal",
        _STEPS,
        'the host compares buffers with the rule "equal"',
    ),
    *(
        Wait(
            f"^strategy=(?!single ).* {count} [^ ]+ norms ",
            "strategies/step_buffers.py _same_bits",
            "equal",
            {"first steps": 2 * count, "step": count},
            _BUFFERS,
        )
        for count in (1, 2)
    ),
    *(
        Wait(
            f"^strategy=(fsdp|hsdp|mesh) .* {count} [^ ]+ {recipe} ",
            _AGREES,
            kind,
            {"first steps": waits},
            "they differ then",
        )
        for (recipe, count), waits in _COMPARED.items()
        for kind in ("item", _FROM_HOST)
    ),
    Wait(
        "^strategy=mesh ",
        f"collectives/exact.py start_all_reduce.wait_for_sums of {_METRICS}",
        _TO_HOST,
        {"evaluation": 1},
        _MESH,
    ),
    Wait(
        "^strategy=mesh ",
        f"{_GATHERED} strategies/loss_record.py AgreedLosses._exchange",
        _TO_HOST,
        {"first steps": 1},
        _MESH,
    ),
    Wait("OFFLOAD", "strategies/loss_scaling.py scale_gradients", _TO_HOST, _STEPS, _OFFLOADED),
    Wait(
        "OFFLOAD",
        "strategies/unit_gradients.py _complete_last.complete",
        "event",
        {"first steps": 28, "step": 28},
        _OFFLOADED,
    ),
)
