"""Parameters that workers agree on at once, by an outer optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import SGD

from worldsize.core import StateDict
from worldsize.strategies.periodic.exchange import Begun, Exchange, flat, split_like, wide


@final
class Fragment:
    """Parameters that workers exchange together, and what all workers agreed on last.

    ``own`` are this worker's, changed in place. SGD with Nesterov momentum moves what was agreed by outer gradients:
    the mean over workers of what was agreed minus what each has come to.
    """

    def __init__(self, own: Sequence[Tensor], exchange: Exchange, *, lr: float, momentum: float) -> None:
        self._own, self._exchange = list(own), exchange
        self._agreed = [nn.Parameter(wide(tensor.detach()).clone()) for tensor in own]
        self._optimizer = SGD(self._agreed, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self._numel = sum(tensor.numel() for tensor in own)
        self._momentum = momentum > 0
        self._begun: Begun | None = None  # the first half of an exchange on its way
        self._arriving: Callable[[], Tensor] | None = None  # its second half: waits for the mean
        self.restart()

    def restart(self) -> None:
        """Take what this worker has, which is what all have, for agreed."""
        for agreed, tensor in zip(self._agreed, self._own, strict=True):
            agreed.data.copy_(tensor)
            if self._momentum:  # zeros are what SGD itself begins with
                self._optimizer.state[agreed] = {"momentum_buffer": wide(tensor.detach()).mul(0)}
        self._begun, self._arriving = None, None

    def send(self) -> int:
        """Begin to exchange outer gradients, and return the bytes that this worker sends."""
        device = self._exchange.device
        self._begun = self._exchange.begin(flat(self._agreed, device).sub_(flat(self._own, device)))
        return self._exchange.sent(self._numel)

    def relay(self) -> None:
        """Begin the second half of the exchange, if one is on its way."""
        if self._begun is not None:
            self._arriving, self._begun = self._begun(), None

    def _mean(self) -> Tensor | None:
        """Wait for the outer gradient and return it, flat; None: none is on its way."""
        self.relay()
        if self._arriving is None:
            return None
        mean_n = self._arriving()
        self._arriving = lambda: mean_n
        return mean_n

    def apply(self, mix: float = 0.0) -> None:
        """Take the outer step; this worker's parameters become ``mix`` × what they are + (1 − mix) × what is agreed."""
        if (mean_n := self._mean()) is None:
            return
        self._arriving = None
        for agreed, gradient in zip(self._agreed, split_like(mean_n, self._agreed), strict=True):
            agreed.grad = gradient.to(agreed)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for tensor, agreed in zip(self._own, self._agreed, strict=True):
            tensor.detach().copy_(agreed.detach() if mix == 0 else wide(tensor.detach()).lerp(agreed.detach(), 1 - mix))

    def state(self, *, in_flight: bool) -> StateDict:
        """Return the state, the same on every worker. ``in_flight``: with what is on its way, which is waited for."""
        momentum = [self._optimizer.state[agreed]["momentum_buffer"] for agreed in self._agreed if self._momentum]
        state: StateDict = {"agreed": [agreed.detach() for agreed in self._agreed], "momentum": momentum}
        if not in_flight:
            return state
        mean_n = self._mean()
        incoming = flat(self._agreed, self._exchange.device).zero_() if mean_n is None else mean_n
        return {**state, "is_coming": mean_n is not None, "incoming": incoming}

    def load(self, state: StateDict) -> None:
        """Take what :meth:`state` gave; a mean that was on its way then has arrived."""
        for agreed, value in zip(self._agreed, state["agreed"], strict=True):
            agreed.data.copy_(value)
        for agreed, value in zip(self._agreed, state["momentum"], strict=False):
            self._optimizer.state[agreed]["momentum_buffer"].copy_(value)
        self._begun, self._arriving = None, None
        if state.get("is_coming"):
            incoming_n = state["incoming"].clone()
            self._arriving = lambda: incoming_n
