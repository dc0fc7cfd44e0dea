"""Reproducibility modes (torch flags, library variables, threads), and digests of state.

Equal digests mean bitwise equal states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch

from worldsize.core import Range, Reduction
from worldsize.moved import resolve_renamed

# Without the first variable, cuBLAS chooses a workspace, and thus a reduction order, at run time (CUDA docs,
# "Results reproducibility"). NVLS all-reduce is not deterministic between calls (nccl #1497).
_PINNED_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True)
class Determinism:
    """One reproducibility mode.

    ``deterministic`` makes torch refuse nondeterministic kernels. ``threads`` fixes the number of intra-op threads per
    process, and thus the reduction order on a CPU (``None``: share the cores). ``reduce="ordered"`` reduces gradients
    in an order that does not depend on the number of processes.
    """

    mode: str
    deterministic: bool = False
    cudnn_benchmark: bool = False
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    threads: Annotated[int | None, Range(least=1, most=4096)] = None
    reduce: Reduction = "flat"

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables to set in every worker before libraries read them."""
        return _PINNED_VARIABLES if self.deterministic else {}

    def apply(self, device: str) -> None:
        """Set torch's global flags in this process for computation on ``device`` ("cpu" or "cuda")."""
        # use_deterministic_algorithms does the same, but also imports the compiler, which takes 1.7 s per worker
        torch.set_deterministic_debug_mode("error" if self.deterministic else "default")
        # filling launches one kernel per new tensor, even if the tensor is overwritten immediately
        torch.utils.deterministic.fill_uninitialized_memory = device == "cpu"  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = self.deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.matmul_precision != "highest"  # for convolutions; the default is True
        if self.deterministic and device == "cuda":
            # flash attention is the only fused kernel with a deterministic backward pass
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)

    @property
    def exact_mode(self) -> str | None:
        """Name of the mode if it guarantees bitwise reproducibility, otherwise None."""
        return self.mode if self.deterministic else None

    def describe(self) -> dict[str, Any]:
        """Convert the mode to plain values for the manifest."""
        attention = "flash or math on CUDA" if self.deterministic else "any"
        return {**asdict(self), "attention": attention, "variables": dict(self.variables())}


def tensor_digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's dtype, shape and bytes, keyed by name."""
    return {name: _hash_tensor(state[name].detach().cpu().contiguous()) for name in sorted(state)}


def state_digest(digests: Mapping[str, str]) -> str:
    """Combine the names and digests of all tensors into one SHA-256."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _hash_tensor(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def __getattr__(name: str) -> Any:
    return resolve_renamed(__name__, name)
