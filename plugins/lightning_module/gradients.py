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
    """Why the gradient has contributions other than ``losses``, with a remedy; empty if it has none."""


@final
class Gradients:
    """The gradients of one training step, each represented by the losses whose gradient it is.

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
        """Return the summed loss for the step of ``name``; other gradients may become invalid.

        Raises:
            ConfigError: no losses were added, or the gradient has other contributions.
        """
        own = self._gradients[name]
        if own.spoiled:
            raise ConfigError(own.spoiled)
        if not own.losses:
            raise ConfigError(
                f"step() of optimizer {name!r} requires a manual_backward after its last zero_grad(). Call "
                "self.manual_backward(loss) instead of loss.backward() before step()."
            )
        losses, own.losses = own.losses, []
        own.spoiled = (
            f"optimizer {name!r} steps again without zero_grad(), but gradients are not kept after a step. "
            "Call zero_grad() before manual_backward."
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
                    f"the loss of optimizer {name!r} may also depend on parameters of {other!r}, which cannot be "
                    "checked with fsdp. Call zero_grad() of each optimizer before its manual_backward, or use "
                    "toggle_optimizer."
                )
            elif reach == "unknown":
                gradient.spoiled = (
                    f"the loss of optimizer {other!r} was computed before the step of {name!r}, and changes to its "
                    f"gradient cannot be checked with fsdp. Compute the loss of {other!r} after that step, or step "
                    f"{other!r} first."
                )
            elif is_used and reach == "yes":
                gradient.spoiled = (
                    f"optimizers {name!r} and {other!r} step on the same loss, but its gradient for {other!r} is not "
                    f"kept after the step of {name!r}. Call zero_grad() of {other!r} before its manual_backward, or "
                    "use toggle_optimizer. To step both on one loss, use one optimizer for all parameters."
                )
            elif reach == "yes":
                gradient.spoiled = (
                    f"the loss of optimizer {other!r} was computed before the step of {name!r}, but gradients are "
                    f"computed in step(). Compute the loss of {other!r} after that step, or step {other!r} first."
                )
        gradient.losses = [loss for loss in gradient.losses if all(loss is not each for each in used)]

    def explain_leftovers(self) -> dict[str, str]:
        """Return why leftover gradients cannot be accumulated in the next step, by optimizer name."""
        reasons = {name: each.spoiled for name, each in self._gradients.items()}
        for name, each in self._gradients.items():
            if each.losses and not each.spoiled:
                reasons[name] = (
                    f"gradient accumulation over several batches is not supported (optimizer {name!r}). Step in "
                    "every batch after manual_backward, and use an N times larger batch_size with logical_ranks=N."
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
