"""Mastership: the right of one server at a time to acknowledge pushes to a shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from worldsize.net.registry import Registry


class Mastership(ABC):
    """The right of a server to acknowledge pushes to its shard."""

    @abstractmethod
    def renew(self) -> bool:
        """Become master of the next epoch; False if another server has."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether no other server has become master since."""


@final
class SoleMastership(Mastership):
    """The mastership of a server without rivals, which is not registered."""

    def renew(self) -> bool:
        return True

    def is_current(self) -> bool:
        return True


@final
class RegisteredMastership(Mastership):
    """Mastership by registration: the server that registered for the newest epoch has it.

    Args:
        registry: The registry of the run's services.
        service: The name of the shard there.
        address: The address at which this server listens.
        name: The name of this server, as in its certificate.

    Attributes:
        epoch: The epoch in which this server is master, or the newest that it has seen as a standby.
    """

    def __init__(self, registry: Registry, service: str, *, address: str, name: str) -> None:
        self._registry, self._address, self._name = registry, address, name
        self.service = service
        self.epoch = 0

    def renew(self) -> bool:
        if not self._registry.acquire(self.service, self.epoch + 1, self._address, self._name):
            return False
        self.epoch += 1
        return True

    def is_current(self) -> bool:
        entry = self._registry.newest(self.service)
        return entry is None or entry.epoch == self.epoch
