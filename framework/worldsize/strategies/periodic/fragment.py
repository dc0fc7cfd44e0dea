"""Parameters that workers synchronize together, by an outer optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import SGD

from worldsize.core import StateDict
from worldsize.strategies.periodic.exchange import Begun, Exchange, flat, split_like, wide


@final
class Fragment:
    """Parameters that workers exchange together, and their last synchronized values.

    ``own`` are this worker's parameters, changed in place. SGD with Nesterov momentum updates the synchronized values
    by the outer gradient: their difference from each worker's parameters, averaged over workers (DiLoCo, Douillard et
    al. 2023, arXiv 2311.08105).
    """

    def __init__(self, own: Sequence[Tensor], exchange: Exchange, *, lr: float, momentum: float) -> None:
        self._own, self._exchange = list(own), exchange
        self._agreed = [nn.Parameter(wide(tensor.detach()).clone()) for tensor in own]
        self._optimizer = SGD(self._agreed, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self._numel = sum(tensor.numel() for tensor in own)
        self._momentum = momentum > 0
        self._begun: Begun | None = None  # the first half of an exchange in flight
        self._arriving: Callable[[], Tensor] | None = None  # its second half: waits for the mean
        self.restart()

    def restart(self) -> None:
        """Use this worker's parameters, which are equal on all workers, as the synchronized values."""
        for agreed, tensor in zip(self._agreed, self._own, strict=True):
            agreed.data.copy_(tensor)
            if self._momentum:  # SGD itself begins with zeros
                self._optimizer.state[agreed] = {"momentum_buffer": wide(tensor.detach()).mul(0)}
        self._begun, self._arriving = None, None

    def send(self) -> int:
        """Start to exchange outer gradients, and return the bytes that this worker sends."""
        device = self._exchange.device
        self._begun = self._exchange.begin(flat(self._agreed, device).sub_(flat(self._own, device)))
        return self._exchange.sent(self._numel)

    def relay(self) -> None:
        """Start the second half of the exchange, if one is in flight."""
        if self._begun is not None:
            self._arriving, self._begun = self._begun(), None

    def _mean(self) -> Tensor | None:
        """Wait for the outer gradient and return it, a tensor (n,); None: no exchange is in flight."""
        self.relay()
        if self._arriving is None:
            return None
        mean_n = self._arriving()
        self._arriving = lambda: mean_n
        return mean_n

    def apply(self, mix: float = 0.0) -> None:
        """Take the outer step, then set parameters to ``mix`` × themselves + (1 − mix) × synchronized values."""
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
        """Return the state, equal on all workers. ``in_flight``: including the exchange in flight, which is awaited."""
        momentum = [self._optimizer.state[agreed]["momentum_buffer"] for agreed in self._agreed if self._momentum]
        state: StateDict = {"agreed": [agreed.detach() for agreed in self._agreed], "momentum": momentum}
        if not in_flight:
            return state
        mean_n = self._mean()
        incoming = flat(self._agreed, self._exchange.device).zero_() if mean_n is None else mean_n
        return {**state, "is_coming": mean_n is not None, "incoming": incoming}

    def load(self, state: StateDict) -> None:
        """Load what :meth:`state` returned; a mean that was then in flight has arrived."""
        for agreed, value in zip(self._agreed, state["agreed"], strict=True):
            agreed.data.copy_(value)
        for agreed, value in zip(self._agreed, state["momentum"], strict=False):
            self._optimizer.state[agreed]["momentum_buffer"].copy_(value)
        self._begun, self._arriving = None, None
        if state.get("is_coming"):
            incoming_n = state["incoming"].clone()
            self._arriving = lambda: incoming_n
