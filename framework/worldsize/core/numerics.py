"""Numerics of a run: precision, clipping and handling of non-finite values.

They are identical for all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, final

from worldsize.core.limits import Range
from worldsize.errors import ConfigError

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

PrecisionName = Literal["fp32", "bf16", "fp16", "fp8"]
Nonfinite = Literal["stop", "skip", "ignore"]
ActivationCheckpointing = Literal["none", "full", "selective"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@final
@dataclass(frozen=True)
class Precision:
    """Precision of the forward and backward passes; parameters are float32.

    Attributes:
        autocast: Name of the torch dtype for ``torch.autocast``; None: do not autocast.
        scales_loss: Whether the loss is scaled, because gradients may underflow the dtype.
        has_8_bits: Whether linear layers multiply in 8 bits, with CUDA kernels.
    """

    autocast: str | None = None
    scales_loss: bool = False
    has_8_bits: bool = False


PRECISIONS: Mapping[PrecisionName, Precision] = {
    "fp32": Precision(),
    "bf16": Precision("bfloat16"),
    "fp16": Precision("float16", scales_loss=True),
    "fp8": Precision("bfloat16", has_8_bits=True),
}


@dataclass(frozen=True)
class Numerics:
    """Numerics of an update: precision, compilation, clipping, and handling of NaN.

    Attributes:
        precision: Precision of the forward and backward passes; parameters are float32. With "fp8", linear layers
            multiply in 8 bits and everything else runs as with "bf16".
        clip_norm: Largest L2 norm of the whole gradient; None: no clipping.
        nonfinite: "stop" ends the run when a logged loss is NaN or infinite; "skip" skips updates with a non-finite
            gradient norm; "ignore" does neither.
        compile: Whether torch compiles forward and backward. Compiled code rounds differently from eager execution.
        compile_mode: The ``mode`` of ``torch.compile``.
        activation_checkpointing: Activations of a block that are recomputed in the backward pass instead of stored:
            all ("full"), or all except the results of matrix products and attention ("selective").
        activation_offload: Whether to keep activations in host memory until the backward pass.
        logical_tensor: Number of slices, a power of two, into which layers of the recipe's tensor plan are split.
            Results are bitwise identical at every ``strategy.tensor`` that divides it. 1: whole layers.
        logical_context: Number of chunks per sequence, a power of two, computed one by one. Results are bitwise
            identical at every ``strategy.context`` that divides it. 1: whole sequences.
    """

    precision: PrecisionName = "fp32"
    clip_norm: Annotated[float | None, Range(above=0, finite=False, hint="null disables clipping")] = None
    nonfinite: Nonfinite = "stop"
    compile: bool = False
    compile_mode: CompileMode = "default"
    activation_checkpointing: ActivationCheckpointing = "none"
    activation_offload: bool = False
    logical_tensor: Annotated[int, Range(least=1, most=4096)] = 1
    logical_context: Annotated[int, Range(least=1, most=4096)] = 1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} is unknown. Available: {', '.join(PRECISIONS)}.")
        if self.nonfinite not in ("stop", "skip", "ignore"):
            raise ConfigError(f"nonfinite={self.nonfinite!r} is unknown. Available: stop, skip, ignore.")
        if self.activation_offload and self.activation_checkpointing == "selective":
            raise ConfigError(
                "activation_offload=true is not supported with activation_checkpointing=selective. "
                "Set activation_checkpointing=full or none."
            )
        for key, parts in (("logical_tensor", "slices"), ("logical_context", "chunks")):
            number = getattr(self, key)
            if number & (number - 1):
                power = 1 << number.bit_length()
                raise ConfigError(
                    f"{key}={number} must be a power of two, so that {parts} are summed in pairs. Set {power // 2} or "
                    f"{power}."
                )
        if self.logical_tensor > 1 and self.policy.has_8_bits:
            raise ConfigError(
                f"precision={self.precision} is not supported with logical_tensor={self.logical_tensor}: each slice "
                "would have a different scale. Set logical_tensor=1, or precision=bf16."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm} must be positive. Set null to disable clipping.")

    @property
    def policy(self) -> Precision:
        """The properties of ``precision``."""
        return PRECISIONS[self.precision]

    @property
    def needs_norm(self) -> bool:
        """Whether an update needs the gradient norm first, for clipping or a finiteness check."""
        return self.clip_norm is not None or self.nonfinite == "skip"

    @property
    def records_graphs(self) -> bool:
        """Whether torch records the compiled passes as CUDA graphs."""
        return self.compile and self.compile_mode in ("reduce-overhead", "max-autotune")

    @property
    def norm_limit(self) -> float:
        """The largest L2 norm of a gradient after clipping; infinite without clipping."""
        return float("inf") if self.clip_norm is None else self.clip_norm

    def should_skip_update(self, norm: Tensor) -> bool:
        """Return whether the step's update is skipped, given its gradient ``norm`` (a scalar).

        Synchronizes with the device.
        """
        return self.nonfinite == "skip" and not bool(norm.isfinite())
