"""Small programs with losses on submodules, or models with unusual submodules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from worldsize.testing.loops import Case, Loop


class Head(nn.Module):
    """Module with a body and a head, which a loss may call separately."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
        self.target = 0.1

    def forward(self, inputs: Tensor) -> Tensor:
        return self.predict(self.features(inputs))

    def features(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.body(inputs)
        return hidden

    def predict(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


@dataclass(frozen=True)
class Methods(Loop):
    """Calls methods and submodules of the model, and reads one of its attributes."""

    def build_net(self) -> nn.Module:
        return Head()

    def loss(self, model: Any, batch: Any) -> Tensor:
        hidden = model.features(batch[0])
        out = model.head(hidden) + model.get_submodule("body")[0](batch[0]).mean(1, keepdim=True)
        other: Tensor = (model.predict(hidden) - model.target).square().mean()
        return F.mse_loss(out, batch[1]) + other


@dataclass(frozen=True)
class Items(Loop):
    """Calls the layers of a Sequential one by one."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model[2](model[1](model[0](batch[0]))), batch[1])


@dataclass(frozen=True)
class Penalty(Loop):
    """Adds an L2-SP penalty on all parameters, or on those with the name prefix ``only``."""

    only: str = ""
    first: bool = False
    """Whether to compute the penalty before the forward pass."""

    def build_net(self) -> nn.Module:
        return Head()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        penalty = self._compute_penalty(model) if self.first else torch.zeros(())
        loss = F.mse_loss(model(batch[0]), batch[1])
        return loss + 0.5 * (penalty if self.first else self._compute_penalty(model))

    def _compute_penalty(self, model: nn.Module) -> Tensor:
        chosen = [each for name, each in model.named_parameters() if name.startswith(self.only)]
        return torch.stack([(each - torch.full(each.shape, 0.05)).square().sum() for each in chosen]).sum()


@dataclass(frozen=True)
class BlockPenalty(Penalty):
    """Like :class:`Penalty`, with the penalized submodules as blocks."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [model.body, model.head]


class Temperature(nn.Module):
    """Module with zero-dimensional parameters and a one-element parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(1))
        self.positive = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs) * self.scale.exp() + self.bias
        return out + self.positive * (inputs[:, :1] > 0)


@dataclass(frozen=True)
class Scalars(Loop):
    """Trains zero-dimensional parameters with SGD and momentum."""

    def build_net(self) -> nn.Module:
        return Temperature()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class TiedEmbedding(nn.Module):
    """An embedding tied to the last layer's weight, and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.middle

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.middle(self.embed(tokens))))
        return out


@dataclass(frozen=True)
class TiedWeights(Loop):
    """Predicts tokens with tied weights."""

    def build_net(self) -> nn.Module:
        return TiedEmbedding()

    def data(self, split: str) -> TensorDataset:
        samples = torch.arange(72 if split == "train" else 13)
        return TensorDataset((samples * 7 + 3) % 11, (samples * 5 + 1) % 11)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), torch.tensor(len(batch[0])))}


@dataclass(frozen=True)
class TiedBlocks(TiedWeights):
    """Uses the modules with tied weights, and the shared one, as blocks."""

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [model.embed, model.middle, model.again, model.head]


class Repeated(nn.Module):
    """Module that calls a submodule three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(3):
            hidden = torch.tanh(self.part(hidden))
        out: Tensor = self.last(hidden)
        return out


@dataclass(frozen=True)
class RepeatedPart(Loop):
    """Trains a model that calls a submodule several times."""

    def build_net(self) -> nn.Module:
        return Repeated()


class Attention(nn.Module):
    """torch's own transformer layer, with the four inputs as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.last, self.extra = nn.Linear(8, 1), nn.ParameterList([torch.zeros(1)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(self.first(inputs.unsqueeze(-1)))
        out: Tensor = self.last(hidden.mean(1)) + self.extra[0]
        return out


@dataclass(frozen=True)
class Transformer(Loop):
    """Trains torch's own attention, whose kernels read the parameters of its submodules."""

    def build_net(self) -> nn.Module:
        return Attention()


@dataclass(frozen=True)
class InputDerivative(Loop):
    """Penalizes the derivative with respect to the inputs, as in physics-informed networks."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_(True)
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        penalty: Tensor = slope.square().mean()
        return F.mse_loss(out, batch[1]) + 0.1 * penalty


@dataclass(frozen=True)
class Adversarial(Loop):
    """Trains on adversarial inputs, from a gradient that is not differentiated again."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.mse_loss(model(inputs), batch[1]), inputs)
        return F.mse_loss(model(batch[0] + 0.05 * slope.sign()), batch[1])


class Spectrum(nn.Module):
    """Module with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.complex64))
        self.last = nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last((inputs.to(torch.complex64) @ self.weight).abs())
        return out


@dataclass(frozen=True)
class Complex(Loop):
    """Trains a complex parameter."""

    def build_net(self) -> nn.Module:
        return Spectrum()

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Spectrum)
        with torch.no_grad():
            model.weight.copy_(torch.complex(model.weight.real, torch.cos(model.weight.real)))
        return model


class Uncopied(nn.Module):
    """Module with an attribute that cannot be deep-copied, such as a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.held = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), _Held()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        return out


class _Held:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


@dataclass(frozen=True)
class NotCopied(Loop):
    """Trains a model that cannot be deep-copied."""

    def build_net(self) -> nn.Module:
        return Uncopied()


MODULES: Sequence[Case] = (
    Case("methods", Methods()),
    Case("items", Items()),
    Case("penalty", Penalty()),
    Case("early-penalty", Penalty(first=True)),
    Case("named-penalty", Penalty(only="head")),
    Case("block-penalty", BlockPenalty()),
    Case("scalars", Scalars()),
    Case("tied-weights", TiedWeights()),
    Case("tied-blocks", TiedBlocks()),
    Case("repeated-part", RepeatedPart()),
    Case("transformer", Transformer()),
    Case("input-derivative", InputDerivative()),
    Case("adversarial", Adversarial()),
    Case("complex", Complex()),
    Case("not-copied", NotCopied()),
)
