"""Sets what each reproducibility mode pins: torch's flags, library variables and thread counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch

from worldsize.core import Range, Reduction

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
