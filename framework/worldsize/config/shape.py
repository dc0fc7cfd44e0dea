"""The processes of a run, derived from the configuration and the machine, and checks of their settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldsize.config.schema import RateScaling, RunConfig
from worldsize.core import (
    AgentLauncher,
    Autoscaler,
    BatchLauncher,
    Cluster,
    FeatureRecipe,
    IntegrityConfig,
    Launcher,
    LaunchMethod,
    Numerics,
    Recipe,
    Role,
    Strategy,
    saves_state,
)
from worldsize.devices import backend_for, backend_names
from worldsize.errors import ConfigError, neighbours
from worldsize.world.roles import can_heal, count_at_most, get_blocks

if TYPE_CHECKING:  # imports torch
    from worldsize.loop.faults import Faults
    from worldsize.record.determinism import Determinism

_logger = logging.getLogger(__name__)

_MOST_SAMPLES = 10**8  # per micro-batch; more would exceed the memory of the largest machines
AnyLauncher = Launcher | AgentLauncher | BatchLauncher


@dataclass(frozen=True)
class RunShape:
    """The processes of a run, their strategy and launcher, without the recipe."""

    run: RunConfig
    cluster: Cluster
    strategy: Strategy
    determinism: Determinism
    numerics: Numerics
    launcher: AnyLauncher
    roles: Mapping[str, Role]
    logical_ranks: int
    rate_scaling: RateScaling

    @property
    def heals(self) -> bool:
        """Whether training continues without failed processes."""
        return can_heal(self.roles)

    @property
    def trains(self) -> bool:
        """Whether the run trains, rather than evaluating a checkpoint or examining its cluster."""
        return self.run.evaluates is None and self.run.examine is None

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per data-parallel replica and step."""
        return self.logical_ranks // self.strategy.data_parallel(self.cluster)

    def check_batch(self, size: int) -> None:
        """Raise ConfigError unless workers divide the logical ranks, and logical ranks divide the batch ``size``."""
        if self.trains:
            check_divisible(self.logical_ranks, workers=self.strategy.data_parallel(self.cluster), batch=size)
            self.strategy.check_micro_batches(self.micro_batches)

    @property
    def excludes_slow(self) -> bool:
        """Whether the run is requeued without the hosts of stragglers."""
        return isinstance(self.launcher, BatchLauncher) and self.launcher.exclude_slow


def count_training_nodes(hosts: Sequence[str], *, spare: int) -> int:
    """Return the number of training hosts: all of ``hosts`` except the last ``spare``, which are on standby.

    Raises:
        ConfigError: no host is left to train.
    """
    if hosts and spare >= len(hosts):
        raise ConfigError(
            f"cluster.spare_nodes={spare} must be less than the {len(hosts)} hosts in cluster.hosts. "
            f"Set at most {len(hosts) - 1}, or add hosts."
        )
    return len(hosts) - spare


def resolve_processes(cluster: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return the cluster with ``processes`` filled in; ``gpus`` is the number of GPUs of this node.

    Raises:
        ConfigError: there are no processes, the nodes do not divide them evenly, there are too few GPUs, or the device
            type is unknown.
    """
    nodes = cluster["nodes"]
    if "gpus_per_node" in cluster or "accelerators" in cluster:  # the nodes are other machines
        gpus = cluster.get("gpus_per_node") or _accelerators(cluster.get("accelerators"))
        cluster = {**cluster, "device": cluster["device"] or ("cuda" if gpus else "cpu")}
    if cluster["device"] is None:
        raise ConfigError(
            "cluster.device=null requires a cluster with cluster.gpus_per_node or cluster.accelerators. "
            "Set cluster.device=cpu or cluster.device=cuda."
        )
    if nodes < 1:
        raise ConfigError(f"cluster.nodes={nodes} must be 1 or more.")
    processes = _processes(cluster, nodes, gpus)
    if processes < 1:
        raise ConfigError(f"cluster.processes={processes} must be 1 or more.")
    if processes % nodes:
        multiple = -(-processes // nodes) * nodes
        raise ConfigError(
            f"{processes} processes are not divisible by {nodes} nodes. Set cluster.processes={multiple}."
        )
    return {**cluster, "processes": processes, "processes_per_node": processes // nodes}


def _accelerators(text: str | None) -> int:
    """Return the number of accelerators in SkyPilot's notation, e.g. 4 for "A100:4"."""
    name, _, count = (text or "").partition(":")
    if count and not count.isdigit():
        raise ConfigError(f"cluster.accelerators={text} must have the form NAME:COUNT, e.g. A100:4.")
    return int(count or 1) if name else 0


def check_gpus(processes_per_node: int, gpus: int, kind: str = "cuda") -> None:
    """Raise ConfigError unless each process on this node can have its own GPU, or other device of this ``kind``."""
    named = "GPU" if kind == "cuda" else f"{kind} device"
    if gpus == 0:
        raise ConfigError(f"cluster.device={kind}: torch found no {named} on this machine. Set cluster=laptop.")
    if processes_per_node > gpus:
        raise ConfigError(
            f"{processes_per_node} processes require one {named} each, but this machine has {gpus}. "
            f"Set cluster.processes={gpus} or fewer."
        )


def _processes(cluster: Mapping[str, Any], nodes: int, gpus: int) -> int:
    total: int | None = cluster.get("processes")
    per_node: int | None = cluster.get("processes_per_node")
    if total is not None and per_node is not None and total != per_node * nodes:
        raise ConfigError(
            f"cluster.processes={total} contradicts cluster.processes_per_node={per_node} on {nodes} nodes. Set "
            f"cluster.processes=null to run {per_node * nodes} processes, or remove cluster.processes_per_node."
        )
    if total is None and per_node is None:
        per_node = gpus if cluster["device"] != "cpu" else 1
        if cluster["device"] != "cpu":
            check_gpus(1, gpus, cluster["device"])
    return total if total is not None else (per_node or 0) * nodes


def check_compiles(numerics: Numerics, strategy: Strategy, *, exact: str | None) -> None:
    """Raise ConfigError if ``compile`` is set, but is not supported or not bitwise reproducible in this mode.

    ``exact``: the reproducibility mode if it guarantees bitwise identical results, otherwise None.
    """
    if not numerics.compile:
        return
    if "compile" not in strategy.supports:
        raise ConfigError(
            f"compile=true is not supported with {type(strategy).__name__}. Set compile=false, or use a strategy such "
            "as ddp or fsdp."
        )
    if exact and numerics.compile_mode.startswith("max-autotune"):
        raise ConfigError(
            f"compile_mode={numerics.compile_mode} is not supported with reproducibility={exact}: kernels are chosen "
            "by autotuning, so results vary between runs. Set compile_mode=default."
        )


def check_slices(numerics: Numerics, strategy: Strategy) -> None:
    """Raise ConfigError if logical slices or chunks are set without ordered reductions, or with ``compile``."""
    for key, parts in (("tensor", "features of a slice"), ("context", "tokens of a chunk")):
        number = getattr(numerics, f"logical_{key}")
        if number == 1:
            continue
        if strategy.reduce != "ordered":
            raise ConfigError(
                f"logical_{key}={number} requires reproducibility=elastic: only this level gives bitwise identical "
                f"results for every strategy.{key}. Set reproducibility=elastic, or logical_{key}=1."
            )
        if numerics.compile:
            raise ConfigError(
                f"compile=true is not supported with logical_{key}={number}: compiled code may round the {parts} "
                f"differently for each strategy.{key}. Set compile=false, or logical_{key}=1."
            )


def check_precision(numerics: Numerics, strategy: Strategy) -> None:
    """Raise ConfigError if the precision needs loss scaling, but ``strategy`` does not support it."""
    if numerics.policy.scales_loss and "loss_scale" not in strategy.supports:
        raise ConfigError(
            f"precision={numerics.precision} is not supported with {type(strategy).__name__}: its processes do not "
            "share a loss scale. Set precision=bf16, or use a strategy such as ddp or fsdp."
        )


def check_device(numerics: Numerics, cluster: Cluster, *, exact: str | None) -> None:
    """Raise ConfigError for features that worldsize supports only on CPUs and CUDA.

    ``exact``: the reproducibility mode if it guarantees bitwise identical results, otherwise None.
    """
    if (kind := cluster.device) in ("cpu", "cuda"):
        return
    wanted = {
        f"reproducibility={exact} (bitwise identical results)": (exact, "reproducibility=seeded"),
        f"precision={numerics.precision} (CUDA kernels)": (numerics.policy.has_8_bits, "precision=bf16"),
        f"compile_mode={numerics.compile_mode} (CUDA graphs)": (
            numerics.records_graphs,
            "compile_mode=default",
        ),
        "activation_offload=true (CUDA streams)": (
            numerics.activation_offload,
            "activation_checkpointing=full and activation_offload=false",
        ),
        "cluster.hca (an NCCL setting)": (cluster.hca, "cluster.hca=null"),
    }
    for fact, (is_wanted, remedy) in wanted.items():
        if is_wanted:
            raise ConfigError(f"{fact} is not supported with cluster.device={kind}. Set {remedy}.")


def check_graphs(numerics: Numerics, cluster: Cluster, micro_batches: int, recipe: Recipe) -> None:
    """Raise ConfigError if CUDA graphs are combined with several micro-batches or updates per step.

    Each micro-batch or update would overwrite the results of the previous one.
    """
    if not (numerics.records_graphs and cluster.device == "cuda"):
        return
    if recipe.has_several_updates:
        raise ConfigError(
            f"compile_mode={numerics.compile_mode} is not supported with several updates per step, as in "
            f"{type(recipe).__name__}: each update would overwrite the results in the CUDA graph. Set "
            "compile_mode=default."
        )
    if micro_batches == 1:
        return
    raise ConfigError(
        f"compile_mode={numerics.compile_mode} requires 1 micro-batch per process and step, got {micro_batches}: each "
        "micro-batch would overwrite the gradients of the previous one in the CUDA graph. Set compile_mode=default, "
        "or set logical_ranks to the number of training processes."
    )


def check_activations(numerics: Numerics, strategy: Strategy, cluster: Cluster) -> None:
    """Raise ConfigError if activation checkpointing or offloading is set, but not supported."""
    chosen = numerics.activation_checkpointing
    if (chosen != "none" or numerics.activation_offload) and "activation_checkpointing" not in strategy.supports:
        raise ConfigError(
            f"{type(strategy).__name__} does not support activation checkpointing or offload. Set "
            "activation_checkpointing=none and activation_offload=false, or choose a strategy such as ddp or fsdp."
        )
    if numerics.activation_offload and cluster.device == "cpu":
        raise ConfigError(
            "activation_offload=true requires a GPU, got cluster.device=cpu. Set activation_offload=false."
        )


def check_stop_after(shape: RunShape) -> None:
    """Raise ConfigError if a scheduler would restart a run that stops after ``run.stop_after``."""
    if shape.run.stop_after is not None and not isinstance(shape.launcher, Launcher):
        raise ConfigError(
            f"run.stop_after={shape.run.stop_after} requires a cluster without a scheduler, which would restart the "
            "stopped run. Remove it, or set cluster=laptop."
        )


def check_operations(shape: RunShape, integrity: IntegrityConfig, recipe: Recipe) -> None:
    """Raise ConfigError if the operations of a step cannot be recorded with these settings and ``recipe``."""
    name, numerics = type(shape.strategy).__name__, shape.numerics
    refusals = {
        f"the strategy {name}: the operations of a logical rank are spread over processes": (
            "operations" not in shape.strategy.supports,
            "Train both runs with strategy=single or ddp",
        ),
        "compile=true: compiled code does not run operations one by one": (
            numerics.compile,
            "Train both runs with compile=false",
        ),
        f"cluster.device={shape.cluster.device}": (
            shape.cluster.device != "cpu",
            "Train both runs with cluster.device=cpu",
        ),
        f"logical_context={numerics.logical_context}": (
            numerics.logical_context > 1,
            "Train both runs with logical_context=1",
        ),
        "strategy.on_failure=heal": (can_heal(shape.roles), "Train both runs with strategy.on_failure=restart"),
        f"{shape.cluster.nodes} nodes": (
            shape.cluster.nodes > 1 or not isinstance(shape.launcher, Launcher),
            "Train both runs with cluster=laptop",
        ),
        "integrity.audit or integrity.replicas: audits repeat the passes of other processes": (
            bool(integrity.audit or integrity.replicas),
            "Train both runs with integrity.audit=0 and integrity.replicas=0",
        ),
        f"{type(recipe).__name__}: its loss combines the features of all logical ranks": (
            isinstance(recipe, FeatureRecipe),
            "Compare the logged metrics and weights instead, without --operations",
        ),
    }
    for fact, (is_refused, remedy) in refusals.items():
        if is_refused:
            raise ConfigError(f"operations cannot be compared with {fact}. {remedy}.")


def check_copies(roles: Mapping[str, Role], strategy: Strategy, peers: int) -> None:
    """Raise ConfigError if a healing gang shards its state, but does not copy shards to peers."""
    if can_heal(roles) and strategy.shards_state and not peers:
        raise ConfigError(
            f"strategy.on_failure=heal with {type(strategy).__name__} requires copies of the sharded state in the "
            "memory of peers. Set checkpoint.peers=1 (steps between two copies) or more."
        )


def check_heals(roles: Mapping[str, Role], cluster: Cluster, launcher: LaunchMethod) -> None:
    """Raise ConfigError if healing is not supported here, or if an option that requires healing is set without it."""
    if not can_heal(roles):
        for name, count in {"spares": cluster.spares, "spare_nodes": cluster.spare_nodes}.items():
            if count:
                raise ConfigError(
                    f"cluster.{name}={count} requires strategy.on_failure=heal. Set strategy.on_failure=heal, or "
                    f"cluster.{name}=0."
                )
        if cluster.min_processes:
            raise ConfigError(
                f"cluster.min_processes={cluster.min_processes} requires strategy.on_failure=heal. Set "
                "strategy.on_failure=heal, or remove cluster.min_processes."
            )
        return
    if cluster.spare_nodes and not launcher.heals_over_hosts:
        raise ConfigError(
            f"cluster.spare_nodes={cluster.spare_nodes} is not supported with {type(launcher).__name__}: it does not "
            "report lost nodes to processes. Use cluster=ssh or slurm, or spare processes (cluster.spares)."
        )
    if not launcher.heals or (cluster.nodes > 1 and not launcher.heals_over_hosts):
        raise ConfigError(
            f"strategy.on_failure=heal is not supported with {type(launcher).__name__} on {cluster.nodes} nodes: dead "
            "processes are not reported to their peers. Set strategy.on_failure=restart, or use cluster=ssh, slurm, "
            "laptop or node."
        )
    if backend_for(cluster.backend, cluster.device) != "gloo":
        raise ConfigError(
            f"strategy.on_failure=heal requires gloo, got cluster.backend={cluster.backend}. NCCL does not block the "
            "host, so survivors could apply an incomplete all-reduce. Set strategy.on_failure=restart and "
            "launcher.max_restarts, or cluster.backend=gloo."
        )
    if (least := cluster.min_processes or 1) > cluster.processes:
        raise ConfigError(
            f"cluster.min_processes={least} exceeds the {cluster.processes} processes of the run. Set "
            f"cluster.min_processes={cluster.processes} or less."
        )


def check_autoscale(policy: Autoscaler, roles: Mapping[str, Role], cluster: Cluster, logical_ranks: int) -> None:
    """Raise ConfigError if the gang cannot be resized, or ``max_processes`` does not fit the run."""
    if not can_heal(roles):
        raise ConfigError(
            "autoscale requires strategy.on_failure=heal. Set strategy.on_failure=heal with a strategy such as ddp, or "
            "autoscale=none."
        )
    if (most := policy.max_processes) is None:
        return
    block = count_at_most(get_blocks(roles), 1)
    if most > logical_ranks * block:
        raise ConfigError(
            f"autoscale.max_processes={most} requires one logical rank per "
            f"{'process' if block == 1 else f'{block} processes'}, but the run has {logical_ranks} logical ranks. Set "
            f"autoscale.max_processes to at most {logical_ranks * block}, or logical_ranks={-(-most // block)} or "
            "more."
        )
    if cluster.processes > most:
        raise ConfigError(
            f"autoscale.max_processes={most} is less than the initial cluster.processes={cluster.processes}. Set "
            f"autoscale.max_processes={cluster.processes} or more."
        )


def check_backend(named: str) -> None:
    """Raise ConfigError if torch lacks a backend in ``named``, which may list one per device ("cpu:gloo,cuda:nccl")."""
    from torch.distributed import Backend  # slow, and not needed to compose

    known = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    for name in backend_names(named):
        if name not in known:
            raise ConfigError(f"cluster.backend={named!r}: unknown backend {name!r}{neighbours(name, known)}")


def check_reduce(strategy: Strategy) -> None:
    """Raise ConfigError if the strategy does not support the reduction set by the user or the reproducibility level."""
    wanted, known, name = strategy.reduce, strategy.reductions, type(strategy).__name__
    if wanted not in known:
        level = (
            " reproducibility=elastic requires strategy.reduce=ordered. Set a different level, or e.g. strategy=ddp."
        )
        fact = f"strategy.reduce={wanted!r} is not supported with {name}{neighbours(wanted, known)}"
        raise ConfigError(fact + (level if wanted == "ordered" else ""))


def check_divisible(total: int, *, workers: int, batch: int) -> None:
    """Raise ConfigError unless workers divide the logical ranks (``total``), and logical ranks divide the batch."""
    if total < 1 or total % workers:
        raise ConfigError(
            f"{total} logical ranks are not divisible by {workers} data-parallel workers. "
            f"Set logical_ranks to a multiple of {workers}, or cluster.processes to a divisor of {total}."
        )
    if batch % total:
        below, above = batch // total * total, -(-batch // total) * total
        options = (
            f"batch_size={below} or {above}" if below else f"batch_size={above} (at least one sample per logical rank)"
        )
        raise ConfigError(f"batch_size={batch} is not divisible by {total} logical ranks. Set {options}.")
    if batch // total > _MOST_SAMPLES:
        raise ConfigError(
            f"batch_size={batch:,} is too large: {batch // total:,} samples on each of {total} logical ranks. "
            f"Set batch_size={total * _MOST_SAMPLES:,} or less."
        )


def check_remembers(recipe: Recipe, roles: Mapping[str, Role], launcher: LaunchMethod, *, exact: str | None) -> None:
    """Raise ConfigError if the run may restart or heal, but the recipe has state outside checkpoints.

    ``exact``: the reproducibility mode if it guarantees bitwise identical results, otherwise None.
    """
    if not recipe.remembers or saves_state(recipe):
        return
    fact = f"{type(recipe).__name__} has state that is not checkpointed (remembers = True)"
    if can_heal(roles):
        raise ConfigError(
            f"strategy.on_failure=heal: {fact}, so it is lost if a process fails. Implement state and load_state, or "
            "set strategy.on_failure=restart."
        )
    if exact and launcher.max_restarts:
        raise ConfigError(
            f"launcher.max_restarts={launcher.max_restarts} is not supported with reproducibility={exact}: {fact}. "
            "Implement state and load_state, or set launcher.max_restarts=0 or reproducibility=seeded."
        )


def check_integrity(integrity: IntegrityConfig, shape: RunShape, recipe: Recipe) -> None:
    """Raise ConfigError if ``integrity`` asks for comparisons that this run cannot make."""
    if not (integrity.audit or integrity.replicas):
        return
    key = "audit" if integrity.audit else "replicas"
    strategy = type(shape.strategy).__name__
    if shape.cluster.processes < 2:
        raise ConfigError(
            f"integrity.{key} requires at least two processes, which compare their bits; the cluster has one. Set "
            f"cluster.processes=2 or more, or integrity.{key}=0."
        )
    if "integrity" not in shape.strategy.supports:
        raise ConfigError(
            f"integrity.{key} is not supported with {strategy}. Set integrity.{key}=0, or use a strategy such as "
            "ddp or fsdp."
        )
    if integrity.on_mismatch == "heal" and not shape.heals:
        raise ConfigError(
            "integrity.on_mismatch=heal requires strategy.on_failure=heal. Set strategy.on_failure=heal, or "
            "integrity.on_mismatch=stop."
        )
    if not integrity.audit:
        return
    if shape.strategy.reduce != "ordered":
        raise ConfigError(
            "integrity.audit requires reproducibility=elastic: in other modes, processes do not compute the same bits "
            "for a logical rank. Set reproducibility=elastic, or integrity.audit=0."
        )
    shape.strategy.check_audit(shape.cluster)
    kind = type(recipe).__name__
    for fact, applies in {
        "makes several updates per step": recipe.has_several_updates,
        "uses the features of all logical ranks": isinstance(recipe, FeatureRecipe),
        "has state, which only the process of a logical rank holds": saves_state(recipe) or recipe.remembers,
    }.items():
        if applies:
            raise ConfigError(f"integrity.audit is not supported with {kind}, which {fact}. Set integrity.audit=0.")


def check_rewinds(shape: RunShape, recipe: Recipe) -> None:
    """Raise ConfigError if this run cannot go back to a checkpoint at a spike."""
    if any(role.serves for role in shape.roles.values()):
        raise ConfigError(
            f"spike.on_spike=rewind is not supported with {type(shape.strategy).__name__}: its servers continue while "
            "workers restart. Set spike.on_spike=warn, or use a strategy such as ddp or fsdp."
        )
    exact = shape.determinism.exact_mode
    if exact and recipe.remembers and not saves_state(recipe):
        raise ConfigError(
            f"spike.on_spike=rewind is not supported with reproducibility={exact}: {type(recipe).__name__} has state "
            "that is not checkpointed (remembers = True). Implement state and load_state, or set spike.on_spike=warn "
            "or reproducibility=seeded."
        )


def check_flips(faults: Faults, strategy: Strategy, recipe: Recipe) -> None:
    """Raise ConfigError if bits are to be flipped that this strategy or recipe would leave unchanged."""
    flips = [fault.flip for fault in faults.planned if fault.flip is not None]
    if not flips:
        return
    if any(flip.target == "gradient" for flip in flips) and strategy.reduce != "ordered":
        raise ConfigError(
            "flipping a gradient requires reproducibility=elastic: other modes do not compute the gradient of each "
            "micro-batch separately. Set reproducibility=elastic, or target=activation."
        )
    if "integrity" not in strategy.supports or recipe.has_several_updates:
        kind = type(recipe if "integrity" in strategy.supports else strategy).__name__
        raise ConfigError(
            f"the fault action flip is not supported with {kind}. Use a strategy such as ddp or fsdp and a recipe with "
            "one update per step, or remove the fault."
        )


def check_resumes(recipe: Recipe, step: int, *, exact: str | None) -> None:
    """Warn if a run resumes after ``step`` without its recipe's state; raise ConfigError if ``exact``.

    ``exact``: the reproducibility mode if it guarantees bitwise identical results, otherwise None.
    """
    if not recipe.remembers or saves_state(recipe) or step == 0:
        return
    kind = type(recipe).__name__
    fact = f"the checkpoint of step {step} does not include the state of {kind} (remembers = True)"
    if exact:
        raise ConfigError(
            f"{fact}, which reproducibility={exact} requires. Implement state and load_state and train again, or set "
            "reproducibility=seeded."
        )
    _logger.warning("%s, so the state is reset. Implement state and load_state.", fact)
