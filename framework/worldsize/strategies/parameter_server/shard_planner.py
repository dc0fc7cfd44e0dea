"""Plans which server owns what of the model that a recipe trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.strategies.multi_train_state import MultiTrainState
from worldsize.strategies.parameter_server.gradient_codecs import GradientCodec
from worldsize.strategies.parameter_server.row_tables import RowRule
from worldsize.strategies.parameter_server.served_checks import check_served
from worldsize.strategies.parameter_server.sharding import ShardingPlan, ShardLayout, plan_shards
from worldsize.strategies.train_state import TrainState

# optimizers that treat each element by itself, so that a parameter can be cut between servers
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")


@final
@dataclass(frozen=True)
class ShardPlanner:
    """Plans the same in every process of a run.

    Attributes:
        servers: The number of servers.
        bucket_bytes: Bytes of parameters that travel as one frame.
        keeps_whole: No parameter is cut between servers.
        rows: How rows of tables are dealt to servers and kept.
        codec: How pushed gradients travel; None: as they are.
    """

    servers: int
    bucket_bytes: int
    keeps_whole: bool
    rows: RowRule
    codec: GradientCodec | None

    def plan(self, train_state: TrainState) -> ShardingPlan:
        """Plan for a recipe with one optimizer. Raises ConfigError if no server can carry it."""
        check_served(train_state.model, train_state.optimizer)
        trained = {name: p for name, p in train_state.model.named_parameters() if p.requires_grad and p.numel()}
        return ShardingPlan(self._shards(trained, train_state.optimizer), self.rows, self.codec)

    def update_plans(self, train_state: MultiTrainState) -> dict[str, ShardingPlan]:
        """Plan for a recipe with several, for each by its name. Raises ConfigError if no server can carry one.

        Each begins with another server, so that the largest parts of all do not meet on one.
        """
        plans, owned = {}, parameters_by_optimizer(train_state)
        for place, (name, part) in enumerate(train_state.parts.items()):
            check_served(part.model, part.optimizer)
            shards = self._shards(owned[name], part.optimizer)
            turned = [shards[(server - place) % self.servers] for server in range(self.servers)]
            plans[name] = ShardingPlan(turned, self.rows, self.codec)
        return plans

    def _shards(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> list[ShardLayout]:
        cut = type(optimizer).__name__ in _ELEMENTWISE and not self.keeps_whole
        return plan_shards(parameters, self.servers, bucket_bytes=self.bucket_bytes, cut=cut)


def parameters_by_optimizer(train_state: MultiTrainState) -> dict[str, dict[str, nn.Parameter]]:
    """Return the trained parameters of each optimizer by their names; those of none, which stay, are the first's."""
    first = next(iter(train_state.parts))
    groups = [(name, group) for name, part in train_state.parts.items() for group in part.optimizer.param_groups]
    owners = {id(parameter): name for name, group in groups for parameter in group["params"]}
    own: dict[str, dict[str, nn.Parameter]] = {name: {} for name in train_state.parts}
    for name, parameter in train_state.model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            own[owners.get(id(parameter), first)][name] = parameter
    return own
