"""Assignment of a model's parameters to servers, and checks of recipes.

Parameters are split into pieces, balanced by bytes, and grouped into buckets. Recipes that parameter servers cannot
train are refused before the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plugins.parameter_server.gradients import GradientCodec
from plugins.parameter_server.row_tables import RowRule
from worldsize.core import ConfigError, Recipe, saves_state
from worldsize.strategies.optimizer_checks import updates_elements
from worldsize.strategies.parameter_changes import refuse_gradient_hooks
from worldsize.strategies.step_hooks import refuse_step_hooks
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.wrapping import refuse_complex, sparse_embeddings

_SMALLEST = 1 << 16  # bytes; smaller parameters are not split


@final
@dataclass(frozen=True)
class RowPiece:
    """Rows ``first`` to ``first + shape[0]`` of the parameter ``name``, or a scalar parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def slice_tensor(self, tensor: Tensor) -> Tensor:
        """Return this piece of a full ``tensor``, a view of its rows, or a whole scalar."""
        return tensor[self.first : self.first + self.shape[0]] if self.shape and tensor.ndim else tensor


@final
@dataclass(frozen=True)
class Bucket:
    """Pieces of one dtype, flattened and sent in this order as one frame."""

    pieces: tuple[RowPiece, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def split_views(self, flat_n: Tensor) -> list[Tensor]:
        """Return the pieces of a flat tensor (n,), as views with their own shapes."""
        ends = accumulate(piece.numel for piece in self.pieces)
        return [flat_n[end - p.numel : end].view(p.shape) for end, p in zip(ends, self.pieces, strict=True)]


ShardLayout = tuple[Bucket, ...]
BucketKey = tuple[int, int]  # the server, and the bucket's index on it


@final
@dataclass(frozen=True)
class ShardingPlan:
    """The plan shared by servers and workers.

    Attributes:
        shards: The buckets of each shard.
        rows: How table rows are assigned to servers and retained.
        codec: Wire format of pushed gradients. None for no compression.
    """

    shards: Sequence[ShardLayout]
    rows: RowRule
    codec: GradientCodec | None = None


def plan_shards(parameters: Mapping[str, Tensor], count: int, *, bucket_bytes: int, cut: bool) -> list[ShardLayout]:
    """Plan the buckets of each of ``count`` servers, in the order of a backward pass.

    Args:
        parameters: Parameters of any shapes, by name.
        count: Number of servers.
        bucket_bytes: Size of a bucket in bytes.
        cut: Whether to split large parameters along dimension 0; valid for elementwise optimizers.
    """
    total = sum(tensor.nbytes for tensor in parameters.values())
    order = {name: place for place, name in enumerate(reversed(list(parameters)))}
    largest = max(_SMALLEST, total // (4 * count)) if cut and count > 1 else total
    pieces = [piece for name, tensor in parameters.items() for piece in _split_parameter(name, tensor, largest, count)]
    loads, owned = [0] * count, [list[RowPiece]() for _ in range(count)]
    for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, order[piece.name], piece.first)):
        least = loads.index(min(loads))
        loads[least] += piece.nbytes
        owned[least].append(piece)
    arrival = [sorted(mine, key=lambda piece: (order[piece.name], piece.first)) for mine in owned]
    return [tuple(Bucket(tuple(group)) for group in _group_into_buckets(mine, bucket_bytes)) for mine in arrival]


def _split_parameter(name: str, tensor: Tensor, largest: int, count: int) -> Iterator[RowPiece]:
    shape = tuple(tensor.shape)
    parts = min(count, shape[0]) if shape and tensor.nbytes > largest else 1
    ends = [shape[0] * part // parts for part in range(parts + 1)] if shape else []
    if parts == 1:
        yield RowPiece(name, tensor.dtype, shape)
        return
    for first, end in pairwise(ends):
        yield RowPiece(name, tensor.dtype, (end - first, *shape[1:]), first)


def _group_into_buckets(pieces: Sequence[RowPiece], limit: int) -> Iterator[list[RowPiece]]:
    group: list[RowPiece] = []
    for piece in pieces:
        full = sum(member.nbytes for member in group) + piece.nbytes > limit
        if group and (full or piece.dtype != group[0].dtype):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


@final
@dataclass(frozen=True)
class ShardPlanner:
    """Creates the same plan in all processes of a run.

    Attributes:
        servers: Number of servers.
        bucket_bytes: Bytes of parameters per frame.
        keeps_whole: Whether parameters must not be split between servers.
        rows: How table rows are assigned to servers and retained.
        codec: Wire format of pushed gradients. None for no compression.
    """

    servers: int
    bucket_bytes: int
    keeps_whole: bool
    rows: RowRule
    codec: GradientCodec | None

    def create_plans(self, recipe: Recipe, train_state: TrainState) -> dict[str, ShardingPlan]:
        """Return plans by optimizer name. Raises ConfigError if servers cannot run one.

        Each plan starts with a different server, so that the largest pieces are not all on the same one.
        """
        plans, owned = {}, parameters_by_optimizer(train_state)
        for place, (name, part) in enumerate(train_state.parts.items()):
            check_served(part.model, part.optimizer)
            shards = self._plan_shards(recipe, part.model, owned[name], part.optimizer)
            turned = [shards[(server - place) % self.servers] for server in range(self.servers)]
            plans[name] = ShardingPlan(turned, self.rows, self.codec)
        return plans

    def _plan_shards(
        self, recipe: Recipe, model: nn.Module, parameters: Mapping[str, Tensor], optimizer: Optimizer
    ) -> list[ShardLayout]:
        cut = self.servers > 1 and not self.keeps_whole and updates_elements(recipe, model, optimizer)
        return plan_shards(parameters, self.servers, bucket_bytes=self.bucket_bytes, cut=cut)


def parameters_by_optimizer(train_state: TrainState) -> dict[str, dict[str, nn.Parameter]]:
    """Return trained parameters by optimizer and name, by default of the first optimizer."""
    first = next(iter(train_state.parts))
    groups = [(name, group) for name, part in train_state.parts.items() for group in part.optimizer.param_groups]
    owners = {id(parameter): name for name, group in groups for parameter in group["params"]}
    own: dict[str, dict[str, nn.Parameter]] = {name: {} for name in train_state.parts}
    for name, parameter in train_state.model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            own[owners.get(id(parameter), first)][name] = parameter
    return own


def check_served(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that servers can run the model and its optimizer.

    Raises:
        ConfigError: the model has batch statistics, complex parameters or gradient hooks, or the optimizer has step
            hooks or lacks a learning rate.
    """
    refuse_gradient_hooks(model)
    refuse_step_hooks(
        optimizer,
        because="which is not supported on parameter servers: each server has only some parameters. Use "
        "strategy=ddp, or remove the hook.",
    )
    if any(not isinstance(group.get("lr"), float | int | Tensor) for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} requires a learning rate (lr), since servers scale updates by lr. "
            "Set lr, or use strategy=ddp."
        )
    refuse_complex(model, because="parameter servers support only real numbers")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"the running statistics of {name} ({type(module).__name__}) are not supported on parameter servers. "
                "Use LayerNorm or GroupNorm, or strategy=ddp."
            )


def refuse_remembering(recipe: Recipe) -> None:
    """Raise ConfigError if a recipe has state across steps, since workers may come and go."""
    if recipe.remembers or saves_state(recipe):
        raise ConfigError(
            f"parameter servers do not support recipes with state between steps, such as {type(recipe).__name__}: "
            "workers may join and leave. Use strategy=ddp, zero or single."
        )


def check_updates(recipe: Recipe, *, consistency: str, replicas: int, compression: str) -> None:
    """Check that several updates per step are exact with these options.

    Args:
        recipe: The recipe with several updates.
        consistency: The effective consistency of the strategy.
        replicas: Number of standbys per server.
        compression: The wire format of pushed gradients.

    Raises:
        ConfigError: steps overlap, servers have standbys, or gradients are compressed.
    """
    kind = type(recipe).__name__
    if consistency != "sync":
        raise ConfigError(
            f"several updates per step ({kind}) require strategy.consistency=sync. Set strategy.consistency=sync, or "
            "strategy=ddp."
        )
    if replicas:
        raise ConfigError(
            f"several updates per step ({kind}) are not supported with standbys. Set strategy.replicas=0; with "
            "launcher.max_restarts a run resumes from its last checkpoint."
        )
    if compression != "none":
        raise ConfigError(
            f"several updates per step ({kind}) are not supported with compression. Set strategy.compression=none."
        )


def check_no_tables(recipe: Recipe, model: nn.Module) -> None:
    """Check that a model with several updates per step does not have tables.

    Raises:
        ConfigError: the model has a sparse embedding.
    """
    for name in sparse_embeddings(model):
        raise ConfigError(
            f"sparse=True of {name} is not supported with several updates per step ({type(recipe).__name__}). Set "
            "sparse=False."
        )
