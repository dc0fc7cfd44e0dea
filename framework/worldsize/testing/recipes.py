"""Small recipes that every strategy can train within a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from worldsize.core import MultiUpdateRecipe, Recipe, TensorStyle, Update

_WIDTH = 16


@dataclass(frozen=True)
class Chain(Recipe):
    """Residual blocks on fixed random data: 101 samples, so that batches straddle epochs.

    The model supports sharding by blocks, tensor parallelism and pipeline stages.
    """

    depth: int = 4

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(7, _WIDTH), *(_Block() for _ in range(self.depth)), nn.Linear(_WIDTH, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def data(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        inputs = torch.randn(101 if split == "train" else 23, 7, generator=generator)
        return TensorDataset(inputs, inputs[:, :3].sin() + inputs[:, 3:6])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        _, targets = batch
        return nn.functional.mse_loss(model(*self.model_inputs(batch)), targets)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        _, targets = batch
        return {
            "error": ((model(*self.model_inputs(batch)) - targets).abs().double().sum(), torch.tensor(targets.numel()))
        }

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [module for module in model.modules() if isinstance(module, _Block)]

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.children())

    def model_inputs(self, batch: Any) -> tuple[Tensor]:
        return (batch[0],)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        blocks = [name for name, module in model.named_modules() if isinstance(module, _Block)]
        styles: dict[str, TensorStyle] = {"up": "column", "down": "row"}
        return {f"{block}.{name}": style for block in blocks for name, style in styles.items()}


class ByMetric(Recipe):
    """Base of recipes whose only metric advances the schedule every ``evaluate_every`` steps."""

    evaluate_every: ClassVar[int] = 1


@dataclass(frozen=True)
class AveragedChain(Chain):
    """A :class:`Chain` whose last layer is evaluated with a moving average of its weights.

    The average is a frozen parameter, or a buffer if ``in_buffer``, which an optimizer hook updates after each step.
    Both are common in practice.
    """

    in_buffer: bool = False

    def model(self) -> nn.Module:
        *layers, last = super().model().children()
        averaged = _AveragedLinear(_WIDTH, 3, in_buffer=self.in_buffer)
        averaged.load_state_dict({**last.state_dict(), "average": last.weight})
        return nn.Sequential(*layers, averaged)

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        averaged = [module for module in model.modules() if isinstance(module, _AveragedLinear)]

        def update_average(*_: object) -> None:
            for module in averaged:
                module.average.lerp_(module.weight.detach(), 0.1)

        optimizer.register_step_post_hook(update_average)
        return optimizer


@dataclass(frozen=True)
class TwoPlayers(MultiUpdateRecipe):
    """Like a GAN: a player learns the targets of a :class:`Chain`, and to fool a critic.

    The critic is updated twice in every third step, and its learning rate falls. Unless ``clips`` is False, a hook
    clips its weights after each update. The player's loss is (sum, weight). An observer with weight decay learns the
    player's output from step 10 on, so that checkpoints of earlier steps have an optimizer that has not stepped.
    Training is deterministic.
    """

    clips: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        player = nn.Sequential(nn.Linear(7, _WIDTH), nn.LayerNorm(_WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 3))
        critic = nn.Sequential(nn.Linear(10, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
        return nn.ModuleDict({"player": player, "critic": critic, "observer": nn.Linear(7, 3)})

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        player, critic = self._get_players(model)
        optimizers: dict[str, Optimizer] = {
            "critic": torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9)),
            "player": torch.optim.SGD(player.parameters(), lr=0.02, momentum=0.5),
            "observer": torch.optim.Adam(self._observer(model).parameters(), lr=0.01, weight_decay=0.1),
        }
        clipped = list(critic.parameters())

        def clip_critic(*_: object) -> None:
            for parameter in clipped:
                parameter.detach().clamp_(-0.4, 0.4)

        if self.clips:
            optimizers["critic"].register_step_post_hook(clip_critic)
        return optimizers

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {"critic": torch.optim.lr_scheduler.LambdaLR(optimizers["critic"], lambda count: 1 / (1 + count / 9))}

    def data(self, split: str) -> TensorDataset:
        return Chain().data(split)

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        player, critic = self._get_players(model)
        inputs, targets = batch
        made = player(inputs)
        for _ in range(2 if step % 3 == 0 else 1):
            real, unreal = (critic(torch.cat([inputs, each], dim=1)) for each in (targets, made.detach()))
            yield "critic", (real - 1).square().mean() + unreal.square().mean()
        judged = critic(torch.cat([inputs, made], dim=1))
        error = (made - targets).square().sum() + 0.1 * (judged - 1).square().sum()
        yield "player", (error, torch.tensor(targets.numel()))
        if step >= 10:
            yield "observer", (self._observer(model)(inputs) - made.detach()).square().mean()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        player, _ = self._get_players(model)
        inputs, targets = batch
        return {"error": ((player(inputs) - targets).abs().double().sum(), torch.tensor(targets.numel()))}

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return (*self._get_players(model), self._observer(model))

    def _get_players(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        assert isinstance(model, nn.ModuleDict)
        return model["player"], model["critic"]

    def _observer(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, nn.ModuleDict)
        return model["observer"]


@final
class _AveragedLinear(nn.Linear):
    average: Tensor

    def __init__(self, inputs: int, outputs: int, *, in_buffer: bool) -> None:
        super().__init__(inputs, outputs)
        if in_buffer:
            self.register_buffer("average", torch.empty_like(self.weight, requires_grad=False))
        else:
            self.register_parameter("average", nn.Parameter(torch.empty_like(self.weight), requires_grad=False))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight if self.training else self.average, self.bias)


@final
class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, hidden_bw: Tensor) -> Tensor:
        wider: Tensor = self.down(self.up(self.norm(hidden_bw)).tanh())
        return hidden_bw + wider
