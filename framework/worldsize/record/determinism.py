"""Makes a run reproducible: the seeds of all random numbers, the settings of each mode, and digests of the state.

A reproducibility mode pins torch's flags, library variables and thread counts. Every random number is derived from
(seed, purpose, indices), independent of the process. Equal digests (SHA-256) mean equal bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, final

import numpy
import torch
from torch import Tensor

from worldsize.core import Range, Reduction
from worldsize.devices import is_accelerator

STREAMS = """Derives every random number of a run from (seed, purpose, indices), independent of the process.

Purposes in use: ``init`` (model initialisation, the same on every rank), ``optimizer`` (what an optimizer draws when it
is made), ``order`` (epoch), ``data`` (step, logical rank; augmentation and data workers; without both, what the recipe
draws while it makes its data), ``pass`` (number, reader; what a stream draws when it begins), ``step`` (step, logical
rank; dropout), ``sparse`` (step, bucket; which gradients are sent) and ``evaluation/SPLIT`` (step; then batch).
"""

# cuBLAS picks a workspace, and with it a reduction order, at run time unless this is set (CUDA docs,
# "Results reproducibility"); NVLS all-reduce is not deterministic between calls (nccl #1497).
_PINNED_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True)
class Determinism:
    """One reproducibility mode.

    ``deterministic`` makes torch refuse kernels whose result depends on timing; ``threads`` pins the
    intra-op threads of each process, which decide the order of sums on a CPU (``None``: share the cores);
    ``reduce="ordered"`` adds gradients up in an order that does not depend on the number of processes.
    """

    mode: str
    deterministic: bool = False
    cudnn_benchmark: bool = False
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    threads: Annotated[int | None, Range(least=1, most=4096)] = None
    reduce: Reduction = "flat"

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of every worker, which libraries read at first use."""
        return _PINNED_VARIABLES if self.deterministic else {}

    def apply(self, device: str) -> None:
        """Set torch's global flags in this process, which computes on ``device`` ("cpu" or "cuda")."""
        # use_deterministic_algorithms does the same and imports the compiler, 1.7 s in every worker
        torch.set_deterministic_debug_mode("error" if self.deterministic else "default")
        # filling takes a kernel for each new tensor, even if it is overwritten at once
        torch.utils.deterministic.fill_uninitialized_memory = device == "cpu"  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = self.deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.matmul_precision != "highest"  # of convolutions; torch allows it
        if self.deterministic and device == "cuda":
            # of the fused kernels only flash attention has a deterministic backward pass
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)

    @property
    def exact_mode(self) -> str | None:
        """The mode if it promises the same bits; None: it does not."""
        return self.mode if self.deterministic else None

    def describe(self) -> dict[str, Any]:
        """Return the mode as plain values, for the manifest."""
        attention = "flash or math on CUDA" if self.deterministic else "any"
        return {**asdict(self), "attention": attention, "variables": dict(self.variables())}


def stream(seed: int, purpose: str, *indices: int) -> int:
    """Return the 63-bit seed of one stream: BLAKE2b of the run's seed, the purpose and the indices."""
    name = f"{seed}/{purpose}/{indices}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def seed_generators(value: int, device: torch.device) -> None:
    """Seed Python, NumPy, torch on the CPU and, if it is another, this process's device.

    Sets torch's generators directly: ``torch.manual_seed`` costs 90 µs, this about 8 µs.
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
    """The states of all generators that :func:`seed_generators` seeds, at one moment."""

    python: Any
    numbers: Any
    torch_cpu: Tensor
    torch_device: Tensor | None  # of an accelerator

    @staticmethod
    def of(device: torch.device) -> GeneratorStates:
        """Return the current states; ``device``: of this process."""
        own = None
        if device.type == "cuda":
            own = torch.cuda.default_generators[device.index].get_state()
        elif is_accelerator(device):
            own = torch.get_device_module(device).get_rng_state()
        return GeneratorStates(random.getstate(), numpy.random.get_state(), torch.default_generator.get_state(), own)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numbers)
        torch.default_generator.set_state(self.torch_cpu)
        if self.torch_device is not None and device.type == "cuda":
            torch.cuda.default_generators[device.index].set_state(self.torch_device)
        elif self.torch_device is not None:
            torch.get_device_module(device).set_rng_state(self.torch_device)


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of all random generators after the context.

    Args:
        device: that of this process, whose generator counts too; None: the CPU.
    """
    device = device or torch.device("cpu")
    states = GeneratorStates.of(device)
    try:
        yield
    finally:
        states.restore(device)


@contextmanager
def drawn_apart(purpose: str) -> Iterator[None]:
    """Let what draws within the context draw from a stream of its own, of which nothing is taken before or after.

    What it draws depends on how torch's generator was last seeded, not on the numbers drawn since then, which a resumed
    run leaves out.
    """
    with generators_kept():
        seed_generators(stream(torch.initial_seed(), purpose), torch.device("cpu"))
        yield


def tensor_digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest dtype, shape and bytes of each tensor; SHA-256 by name."""
    return {name: _digest(state[name].detach().cpu().contiguous()) for name in sorted(state)}


def state_digest(digests: Mapping[str, str]) -> str:
    """Combine the digests of all tensors and their names into one."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
