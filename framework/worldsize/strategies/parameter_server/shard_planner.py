"""Plans which server owns which parameters of a recipe's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import MultiUpdateRecipe, Recipe
from worldsize.strategies.multi_train_state import MultiTrainState
from worldsize.strategies.optimizer_checks import updates_elements
from worldsize.strategies.parameter_server.gradient_codecs import GradientCodec
from worldsize.strategies.parameter_server.row_tables import RowRule
from worldsize.strategies.parameter_server.served_checks import check_served
from worldsize.strategies.parameter_server.sharding import ShardingPlan, ShardLayout, plan_shards
from worldsize.strategies.train_state import TrainState


@final
@dataclass(frozen=True)
class ShardPlanner:
    """Makes the same plan in every process of a run.

    Attributes:
        servers: Number of servers.
        bucket_bytes: Bytes of parameters that are sent as one frame.
        keeps_whole: Whether no parameter is split between servers.
        rows: How rows of tables are assigned to servers and kept.
        codec: Wire format of pushed gradients; None: uncompressed.
    """

    servers: int
    bucket_bytes: int
    keeps_whole: bool
    rows: RowRule
    codec: GradientCodec | None

    def plan(self, recipe: Recipe, train_state: TrainState) -> ShardingPlan:
        """Plan for a recipe with one optimizer. Raises ConfigError if servers cannot run it."""
        check_served(train_state.model, train_state.optimizer)
        trained = {name: p for name, p in train_state.model.named_parameters() if p.requires_grad and p.numel()}
        return ShardingPlan(
            self._shards(recipe, train_state.model, trained, train_state.optimizer), self.rows, self.codec
        )

    def update_plans(self, recipe: MultiUpdateRecipe, train_state: MultiTrainState) -> dict[str, ShardingPlan]:
        """Plan for a recipe with several optimizers, by name. Raises ConfigError if servers cannot run one of them.

        Each plan begins with a different server, so that the largest pieces are not all on the same one.
        """
        plans, owned = {}, parameters_by_optimizer(train_state)
        for place, (name, part) in enumerate(train_state.parts.items()):
            check_served(part.model, part.optimizer)
            shards = self._shards(recipe, part.model, owned[name], part.optimizer)
            turned = [shards[(server - place) % self.servers] for server in range(self.servers)]
            plans[name] = ShardingPlan(turned, self.rows, self.codec)
        return plans

    def _shards(
        self, recipe: Recipe, model: nn.Module, parameters: Mapping[str, Tensor], optimizer: Optimizer
    ) -> list[ShardLayout]:
        cut = self.servers > 1 and not self.keeps_whole and updates_elements(recipe, model, optimizer)
        return plan_shards(parameters, self.servers, bucket_bytes=self.bucket_bytes, cut=cut)


def parameters_by_optimizer(train_state: MultiTrainState) -> dict[str, dict[str, nn.Parameter]]:
    """Return the trained parameters of each optimizer by name; the first one also has those of no optimizer."""
    first = next(iter(train_state.parts))
    groups = [(name, group) for name, part in train_state.parts.items() for group in part.optimizer.param_groups]
    owners = {id(parameter): name for name, group in groups for parameter in group["params"]}
    own: dict[str, dict[str, nn.Parameter]] = {name: {} for name in train_state.parts}
    for name, parameter in train_state.model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            own[owners.get(id(parameter), first)][name] = parameter
    return own
