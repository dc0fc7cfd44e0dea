"""Prepares the passes of a model: fewer activations between forward and backward, and linear layers in 8 bits.

Activations are recomputed by block, or moved to the host. Layers in 8-bit floating point are torchao's.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from worldsize.core import ConfigError, Numerics, Recipe
from worldsize.errors import missing_extra
from worldsize.strategies.compiled import compile_passes
from worldsize.strategies.wrapping import sparse_embeddings

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_LEAST_BYTES = 2**20  # of a tensor that is worth a copy to the host


def prepare_passes(recipe: Recipe, model: nn.Module, numerics: Numerics, device: torch.device) -> None:
    """Let the passes of ``model`` be in 8 bits, be compiled and keep fewer activations, as ``numerics`` says.

    Each block that ``recipe`` names is treated by itself; without blocks, the whole model is compiled and offloaded.
    Parameters, buffers and hooks stay those of ``model``, so wrappers, checkpoints and shards do not notice.
    """
    modules = list(recipe.blocks(model)) or [model]
    if numerics.policy.has_8_bits:
        use_fp8(recipe, model, device)
    if numerics.activation_checkpointing == "selective":  # inside, since the compiler plans what it recomputes
        _wrap(modules, partial(_selective, compiled=numerics.compile))
    if numerics.compile:
        compile_passes(recipe, model, numerics)
    if numerics.activation_checkpointing == "full":  # around: the same compiled code runs again
        _wrap(modules, _recomputed)
    if numerics.activation_offload:
        _wrap(modules, _offloaded)


def check_passes(recipe: Recipe, model: nn.Module, numerics: Numerics, *, serves_rows: bool = False) -> None:
    """Raise ConfigError if activations of ``model`` cannot be recomputed, or to no use; or not computed in 8 bits.

    ``serves_rows``: whether servers hold the rows of its sparse embeddings.
    """
    if numerics.policy.has_8_bits:
        check_fp8(recipe, model)
    chosen = numerics.activation_checkpointing
    if chosen == "none":
        return
    blocks = list(recipe.blocks(model))
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={chosen}: {type(recipe).__name__} names no blocks, and a whole model that is "
            "computed again at once needs as much memory as before. Define Recipe.blocks, or set "
            "activation_checkpointing=none."
        )
    for block in blocks:
        if serves_rows and sparse_embeddings(block):
            raise ConfigError(
                f"activation_checkpointing={chosen}: a block has an embedding with sparse=True, whose rows servers "
                "would send twice. Set activation_checkpointing=none."
            )
        if chosen == "selective" and numerics.compile and any(isinstance(each, _NormBase) for each in block.modules()):
            raise ConfigError(
                "activation_checkpointing=selective: a block has a norm with running statistics, which compiled code "
                "would update twice. Set activation_checkpointing=full, or compile=false."
            )


def _wrap(modules: Sequence[nn.Module], wrapped: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> None:
    for module in modules:
        module.forward = wrapped(module, module.forward)  # not a wrapper, whose name would be in checkpoints


def _recomputed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` such that only its inputs are kept; the states of random generators are kept with them."""
    return partial(checkpoint, forward, use_reentrant=False, context_fn=lambda: (nullcontext(), _buffers_kept(module)))


def _selective(module: nn.Module, forward: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
    """Return ``forward`` such that products and attention are kept, and the rest is recomputed."""

    def contexts() -> _Contexts:
        first, again = create_selective_checkpoint_contexts(kept_operations)  # type: ignore[no-untyped-call]
        return first, _both(_buffers_kept(module), again)

    # the compiler knows these contexts, and no others
    chosen = partial(create_selective_checkpoint_contexts, kept_operations) if compiled else contexts
    return partial(checkpoint, forward, use_reentrant=False, context_fn=chosen)


def kept_operations(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether selective checkpointing keeps the result of ``operation``.

    Attention with dropout is recomputed. A second pass that skips it would not advance the random generator, and the
    operations after it would draw other numbers than in the forward pass.
    """
    if operation in _overloads(_PRODUCTS):  # each operation of a pass comes by here
        return CheckpointPolicy.MUST_SAVE
    if operation in _overloads(_ATTENTION) and not _dropout(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


def _dropout(operation: Any, args: Sequence[Any], kwargs: Any) -> float:
    """Return the argument ``dropout_p`` of an operation."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", argument.default_value)
            return float(args[place] if place < len(args) else given)
    return 0.0


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Let a pass that is computed again leave running statistics alone, which the forward pass has updated.

    Raises:
        RuntimeError: the pass has changed any other buffer, which would then have changed twice.
    """
    norms = [each for each in module.modules() if isinstance(each, _NormBase)]
    replaced = [(each, name, buffer) for each in norms for name, buffer in each._buffers.items() if buffer is not None]
    for each, name, buffer in replaced:
        each._buffers[name] = buffer.clone()
    versions = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
    copies = {id(each._buffers[name]) for each, name, _ in replaced}
    try:
        yield
    finally:
        for each, name, buffer in replaced:
            each._buffers[name] = buffer
        for name, buffer, version in versions:
            if buffer._version != version and id(buffer) not in copies:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} changes in each forward pass, so with activation checkpointing "
                    "twice a step. Set activation_checkpointing=none."
                )


def _offloaded(_: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` such that what it saves for the backward pass waits in the memory of the host."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(to_host, from_host):
            return forward(*args, **kwargs)

    return called


def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Return the device of ``tensor``, of any shape, and a copy of it in pinned memory of the host.

    Parameters, which stay on the device anyway, and small tensors are not copied. Copies are in the order of the
    stream, so neither they nor the memory of ``tensor`` are used too early.
    """
    is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if is_parameter or tensor.device.type == "cpu" or tensor.nbytes < _LEAST_BYTES:
        return tensor.device, tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    """Return the tensor, of any shape, that :func:`to_host` has packed, on its own device."""
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


_MULTIPLE = 16  # of both sizes of a weight, as tensor cores need it
_LEAST_CAPABILITY = (8, 9)  # of a GPU that multiplies 8-bit numbers


def use_fp8(recipe: Recipe, model: nn.Module, device: torch.device) -> None:
    """Let linear layers of ``model`` multiply in 8 bits, scaled by the largest number of each tensor.

    These are the layers in the blocks of ``recipe`` (of the whole model without blocks) whose sizes are multiples of
    16. Parameters stay as they are, in float32. Devices without such products round to 8 bits and multiply as before.
    """
    emulates = device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    make = _maker(emulates=emulates)
    for layer in fp8_layers(recipe, model):
        layer.forward = _Product(layer, make)  # type: ignore[assignment, method-assign]  # no wrapper: it has a name


def check_fp8(recipe: Recipe, model: nn.Module) -> None:
    """Raise ConfigError if torchao is not installed, or nothing in ``model`` would compute in 8 bits."""
    if find_spec("torchao") is None:
        raise missing_extra("precision=fp8", package="torchao", extra="fp8")
    if not fp8_layers(recipe, model):
        raise ConfigError(
            f"precision=fp8: {type(recipe).__name__} has no linear layer with both sizes a multiple of {_MULTIPLE} "
            "in its blocks. Change the sizes, or set precision=bf16."
        )


def fp8_layers(recipe: Recipe, model: nn.Module) -> Sequence[nn.Linear]:
    """Return the layers of ``model`` that compute in 8 bits with ``precision=fp8``."""
    modules = [each for part in list(recipe.blocks(model)) or [model] for each in part.modules()]
    return [each for each in modules if isinstance(each, nn.Linear) and _fits(each)]


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _maker(*, emulates: bool) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that makes a layer's 8-bit counterpart; torchao takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulates)

    def make(layer: nn.Linear) -> nn.Module:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        converted: nn.Module = convert_to_float8_training(plain, config=config)
        return converted

    return make


@final
class _Product:
    """Replaces the forward pass of ``layer``, whose parameters it uses wherever a strategy puts them."""

    def __init__(self, layer: nn.Linear, make: Callable[[nn.Linear], nn.Module]) -> None:
        self._layer = make(layer)
        self._layer._parameters = layer._parameters

    def __call__(self, inputs: Tensor) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        output: Any = self._layer(inputs)
        return output  # type: ignore[no-any-return]
