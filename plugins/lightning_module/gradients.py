"""Track the losses that contribute to each optimizer's gradient between backward and step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from torch import Tensor, nn

from worldsize.core import ConfigError


@final
@dataclass
class _Gradient:
    """The gradient of one optimizer since its last ``zero_grad``."""

    losses: list[Tensor] = field(default_factory=list)
    """Losses of backward passes since the last optimizer step."""
    spoiled: str = ""
    """Why the gradient has other contributions, with a remedy; empty without any."""


@final
class Gradients:
    """The gradients of one training step, each represented by the losses it derives from.

    Args:
        parameters: Ids of each optimizer's parameters, by optimizer name.
        known: Ids of all parameters of the model.
        left: Why the gradient left by the previous step cannot be accumulated, by optimizer name.
    """

    def __init__(
        self, parameters: Mapping[str, Collection[int]], known: Collection[int], left: Mapping[str, str]
    ) -> None:
        self._parameters, self._known = parameters, known
        self._gradients = {name: _Gradient(spoiled=left.get(name, "")) for name in parameters}

    def clear_gradient(self, name: str) -> None:
        """Clear the gradient of an optimizer."""
        self._gradients[name] = _Gradient()

    def add_loss(self, loss: Tensor, names: Collection[str]) -> None:
        """Accumulate the gradient of ``loss``, a scalar, for the optimizers ``names``."""
        for name in names:
            self._gradients[name].losses.append(loss)

    def take_loss(self, name: str) -> Tensor:
        """Return the scalar loss for an optimizer's step, which may invalidate other gradients.

        Raises:
            ConfigError: no losses were added, or the gradient has other contributions.
        """
        own = self._gradients[name]
        if own.spoiled:
            raise ConfigError(own.spoiled)
        if not own.losses:
            raise ConfigError(
                f"step() of the optimizer {name!r} without a manual_backward since its zero_grad(): the gradient is "
                "missing. Call self.manual_backward(loss) before; loss.backward() does not count."
            )
        losses, own.losses = own.losses, []
        own.spoiled = (
            f"the optimizer {name!r} steps again without zero_grad(), and worldsize keeps no gradient beyond a step. "
            "Call its zero_grad() before manual_backward."
        )
        for other, gradient in self._gradients.items():
            if other != name:
                self._part_from(gradient, losses, name, other)
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])

    def _part_from(self, gradient: _Gradient, used: list[Tensor], name: str, other: str) -> None:
        """Remove losses ``used`` by ``name`` from ``other``'s gradient, or mark it invalid."""
        for loss in gradient.losses:
            is_used = any(loss is each for each in used)
            reach = self._check_reach(loss, other if is_used else name)
            if is_used and reach == "unknown":
                gradient.spoiled = (
                    f"{name!r} has stepped by a loss that may reach the parameters of {other!r} too, which cannot be "
                    "told here, since fsdp has gathered them. Call zero_grad() of each optimizer before its own "
                    "manual_backward, or toggle_optimizer."
                )
            elif reach == "unknown":
                gradient.spoiled = (
                    f"the optimizer {other!r} steps by a loss from before the step of {name!r}, and whether that step "
                    "has changed its gradient cannot be told here, since fsdp has gathered the parameters. Compute the "
                    f"loss of {other!r} after that step, or step before it."
                )
            elif is_used and reach == "yes":
                gradient.spoiled = (
                    f"a loss reaches the parameters of two optimizers, {name!r} has stepped by it, and its gradient is "
                    f"gone for {other!r}. Call zero_grad() of {other!r} before its own manual_backward, or "
                    "toggle_optimizer; if both shall step by one loss, give all parameters to one optimizer."
                )
            elif reach == "yes":
                gradient.spoiled = (
                    f"the optimizer {other!r} steps by a loss that was computed before {name!r} has stepped, and its "
                    f"gradient is taken at the step. Compute the loss of {other!r} after that step, or step before it."
                )
        gradient.losses = [loss for loss in gradient.losses if all(loss is not each for each in used)]

    def explain_leftovers(self) -> dict[str, str]:
        """Return why leftover gradients cannot be accumulated in the next step, by optimizer name."""
        reasons = {name: each.spoiled for name, each in self._gradients.items()}
        for name, each in self._gradients.items():
            if each.losses and not each.spoiled:
                reasons[name] = (
                    f"the optimizer {name!r} adds up gradients of several batches, which worldsize does not keep. Step "
                    "in every batch after a manual_backward, and set batch_size N times as large and logical_ranks=N."
                )
        return reasons

    def _check_reach(self, loss: Tensor, name: str) -> Literal["yes", "no", "unknown"]:
        """Return whether the gradient of ``loss`` may be nonzero for an optimizer's parameters.

        Leaf parameters outside the model, such as those gathered by FSDP, may belong to any optimizer.
        """
        leaves = find_leaves(loss)
        if any(id(leaf) in self._parameters[name] for leaf in leaves):
            return "yes"
        is_gathered = any(isinstance(leaf, nn.Parameter) and id(leaf) not in self._known for leaf in leaves)
        return "unknown" if is_gathered else "no"


def find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors with gradients after the backward pass of ``loss``, a scalar."""
    leaves: list[Tensor] = [loss] if loss.grad_fn is None and loss.requires_grad else []
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
        nodes += [before for before, _ in node.next_functions]
    return leaves
