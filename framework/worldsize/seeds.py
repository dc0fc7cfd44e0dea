"""Seeds of a run, derived from (seed, purpose, indices) and independent of the process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy
import torch

from worldsize.devices import is_accelerator

STREAMS = """Derives every random number of a run from (seed, purpose, indices), independent of the process.

Purposes in use: ``init`` (model initialisation, the same on every rank), ``optimizer`` (what an optimizer draws when it
is made), ``order`` (epoch), ``data`` (step, logical rank; augmentation and data workers; without both, what the recipe
draws while it makes its data), ``pass`` (number, reader; what a stream draws when it begins), ``step`` (step, logical
rank; dropout), ``layer`` (place; dropout in one layer, derived from ``step``), ``stage`` (the same in a stage without
such streams), ``sparse`` (step, bucket; which gradients are sent) and ``evaluation/SPLIT`` (step; then batch).
"""


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return the 63-bit seed of a random stream: the BLAKE2b hash of the run's seed, the purpose and the indices."""
    name = f"{seed}/{purpose}/{indices}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def seed_generators(value: int, device: torch.device) -> None:
    """Seed the generators of Python, NumPy, torch on the CPU, and this process's device.

    It seeds torch's generators directly, which takes about 8 µs; ``torch.manual_seed`` takes 90 µs.
    """
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
    elif is_accelerator(device):
        torch.get_device_module(device).manual_seed(value)


@final
@dataclass(frozen=True, eq=False)
class GeneratorStates:
    """Snapshot of all generators that :func:`seed_generators` seeds."""

    python: Any
    numbers: Any
    torch_cpu: torch.Tensor
    torch_device: torch.Tensor | None  # None on a CPU

    @staticmethod
    def from_device(device: torch.device) -> GeneratorStates:
        """Return the current states, including the generator of ``device``, this process's device."""
        own = get_generator_state(device) if is_accelerator(device) else None
        return GeneratorStates(random.getstate(), numpy.random.get_state(), torch.default_generator.get_state(), own)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numbers)
        torch.default_generator.set_state(self.torch_cpu)
        if self.torch_device is not None:
            set_generator_state(self.torch_device, device)


def get_generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's generator for ``device``, this process's device, uint8 (bytes,)."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index].get_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def set_generator_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of torch's generator for ``device``, as returned by :func:`get_generator_state`."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    elif device.type == "cuda":
        torch.cuda.default_generators[device.index].set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state)


@contextmanager
def keep_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of all random generators at the end of the block.

    Args:
        device: this process's device, to restore its generator too; None: the CPU.
    """
    device = device or torch.device("cpu")
    states = GeneratorStates.from_device(device)
    try:
        yield
    finally:
        states.restore(device)


@contextmanager
def draw_from(purpose: str) -> Iterator[None]:
    """Draw random numbers from stream ``purpose`` in this block, then restore the generators.

    The stream depends on the last seed of torch's generator, but not on the numbers generated since, because a resumed
    run does not generate those again.
    """
    with keep_generators():
        seed_generators(derive_seed(torch.initial_seed(), purpose), torch.device("cpu"))
        yield
