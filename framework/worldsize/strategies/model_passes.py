"""Activation checkpointing and offloading, compilation, and 8-bit linear layers of a model.

Activations are recomputed by block, or moved to host memory. The 8-bit floating-point layers are torchao's.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from worldsize.core import ConfigError, Numerics, Recipe
from worldsize.errors import require
from worldsize.strategies.compiled import compile_passes
from worldsize.strategies.sequence_chunks import check_sequences
from worldsize.strategies.tensor_layers import get_tensor_plan, slice_layers
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
_LEAST_BYTES = 2**20  # minimum size of a tensor to be offloaded


def prepare_passes(recipe: Recipe, model: nn.Module, numerics: Numerics, device: torch.device) -> None:
    """Apply the 8-bit, compilation and activation options of ``numerics`` to ``model``.

    The options apply to each of ``recipe``'s blocks, or if there are none, to the whole model.
    Parameters, buffers and hooks still belong to ``model``, so wrappers, checkpoints and shards are unaffected.
    """
    modules = list(recipe.blocks(model)) or [model]
    if numerics.logical_tensor > 1:
        slice_layers(recipe, model, numerics.logical_tensor)
    if numerics.policy.has_8_bits:
        use_fp8(recipe, model, device)
    if numerics.activation_checkpointing == "selective":  # before compiling, since the compiler plans the recomputation
        _wrap_forwards(modules, partial(_selective, compiled=numerics.compile))
    if numerics.compile:
        compile_passes(recipe, model, numerics)
    if numerics.activation_checkpointing == "full":  # after compiling, so that the same code runs again
        _wrap_forwards(modules, _wrap_with_recompute)
    if numerics.activation_offload:
        _wrap_forwards(modules, _wrap_with_offload)


def check_passes(recipe: Recipe, model: nn.Module, numerics: Numerics, *, serves_rows: bool = False) -> None:
    """Raise ConfigError if ``model`` cannot use fp8 or activation checkpointing as configured.

    ``serves_rows``: whether servers hold the rows of the model's sparse embeddings.
    """
    if numerics.policy.has_8_bits:
        check_fp8(recipe, model)
    if numerics.logical_tensor > 1:
        get_tensor_plan(recipe, model, slices=numerics.logical_tensor, key="logical_tensor")
    if numerics.logical_context > 1:
        check_sequences(recipe, model, numerics.logical_context, key="logical_context")
    chosen = numerics.activation_checkpointing
    if chosen == "none":
        return
    blocks = list(recipe.blocks(model))
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={chosen} requires Recipe.blocks, which {type(recipe).__name__} does not define. "
            "Recomputing the whole model at once saves no memory. Define Recipe.blocks, or set "
            "activation_checkpointing=none."
        )
    for block in blocks:
        if serves_rows and sparse_embeddings(block):
            raise ConfigError(
                f"activation_checkpointing={chosen} is not supported for blocks with sparse=True embeddings: servers "
                "would send their rows twice. Set activation_checkpointing=none."
            )
        if chosen == "selective" and numerics.compile and any(isinstance(each, _NormBase) for each in block.modules()):
            raise ConfigError(
                "activation_checkpointing=selective with compile=true is not supported for norms with running "
                "statistics: compiled code would update them twice. Set activation_checkpointing=full, or "
                "compile=false."
            )


def _wrap_forwards(
    modules: Sequence[nn.Module], wrapped: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> None:
    for module in modules:
        module.forward = wrapped(module, module.forward)  # a wrapper module would change names in checkpoints


def _wrap_with_recompute(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` to save only its inputs and random states, and recompute the rest."""
    return partial(checkpoint, forward, use_reentrant=False, context_fn=lambda: (nullcontext(), _buffers_kept(module)))


def _selective(module: nn.Module, forward: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
    """Wrap ``forward`` to save results of matrix products and attention, and recompute the rest."""

    def contexts() -> _Contexts:
        first, again = create_selective_checkpoint_contexts(choose_checkpoint_policy)  # type: ignore[no-untyped-call]
        return first, _enter_both(_buffers_kept(module), again)

    # the compiler supports only these contexts
    chosen = partial(create_selective_checkpoint_contexts, choose_checkpoint_policy) if compiled else contexts
    return partial(checkpoint, forward, use_reentrant=False, context_fn=chosen)


def choose_checkpoint_policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether selective checkpointing saves or recomputes the result of ``operation``.

    Attention with dropout is recomputed: otherwise the second pass would not advance the random generator for it, and
    later operations would use different random numbers than in the forward pass.
    """
    if operation in _overloads(_PRODUCTS):  # called for each operation of a pass, so it must be fast
        return CheckpointPolicy.MUST_SAVE
    if operation in _overloads(_ATTENTION) and not _get_dropout(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


def _get_dropout(operation: Any, args: Sequence[Any], kwargs: Any) -> float:
    """Return the ``dropout_p`` argument of an operation, or 0 if it has none."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", argument.default_value)
            return float(args[place] if place < len(args) else given)
    return 0.0


@contextmanager
def _enter_both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Prevent a recomputed pass from updating running statistics a second time.

    Raises:
        RuntimeError: the pass changed any other buffer, which would be changed twice per step.
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
                    f"{type(module).__name__}.{name} changes in each forward pass, which activation checkpointing runs "
                    "twice per step. Set activation_checkpointing=none."
                )


def _wrap_with_offload(_: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` to offload its saved tensors to host memory until the backward pass."""

    def call_offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(to_host, from_host):
            return forward(*args, **kwargs)

    return call_offloaded


def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Return the device of ``tensor``, of any shape, and a copy in pinned host memory.

    Parameters, which stay on the device anyway, and small tensors are not copied. Copies are asynchronous but
    stream-ordered, so neither the copy nor the memory of ``tensor`` is used too early.
    """
    is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if is_parameter or tensor.device.type == "cpu" or tensor.nbytes < _LEAST_BYTES:
        return tensor.device, tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    """Move a tensor packed by :func:`to_host`, of any shape, back to its original device."""
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


_MULTIPLE = 16  # both sizes of a weight must be a multiple, as required by tensor cores
_LEAST_CAPABILITY = (8, 9)  # minimum compute capability for FP8 matrix products


def use_fp8(recipe: Recipe, model: nn.Module, device: torch.device) -> None:
    """Compute linear layers of ``model`` in 8 bits, scaled by the absolute maximum per tensor.

    This applies to layers in the blocks of ``recipe`` (in the whole model if there are none) with sizes that are
    multiples of 16. Parameters stay in float32. Devices without 8-bit products emulate them by rounding the factors.
    """
    emulates = device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    make = _create_converter(emulates=emulates)
    for layer in fp8_layers(recipe, model):
        layer.forward = _Product(layer, make)  # type: ignore[assignment, method-assign]  # no wrapper: keeps names


def check_fp8(recipe: Recipe, model: nn.Module) -> None:
    """Raise ConfigError if torchao is missing, or if no layer of ``model`` computes in 8 bits."""
    require("precision=fp8", "torchao", extra="fp8")
    if not fp8_layers(recipe, model):
        raise ConfigError(
            f"precision=fp8 requires a linear layer with in_features and out_features divisible by {_MULTIPLE}, but "
            f"the blocks of {type(recipe).__name__} have none. Change the sizes, or set precision=bf16."
        )


def fp8_layers(recipe: Recipe, model: nn.Module) -> Sequence[nn.Linear]:
    """Return the layers of ``model`` that compute in 8 bits with ``precision=fp8``."""
    modules = [each for part in list(recipe.blocks(model)) or [model] for each in part.modules()]
    return [each for each in modules if isinstance(each, nn.Linear) and _has_fp8_sizes(each)]


def _has_fp8_sizes(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _create_converter(*, emulates: bool) -> Callable[[nn.Linear], nn.Module]:
    """Import torchao, which takes seconds; return a function that converts a layer to 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulates)

    def convert_layer(layer: nn.Linear) -> nn.Module:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        converted: nn.Module = convert_to_float8_training(plain, config=config)
        return converted

    return convert_layer


@final
class _Product:
    """The 8-bit forward pass of ``layer``, with the layer's own parameters."""

    def __init__(self, layer: nn.Linear, make: Callable[[nn.Linear], nn.Module]) -> None:
        self._layer = make(layer)
        self._layer._parameters = layer._parameters

    def __call__(self, inputs: Tensor) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        output: Any = self._layer(inputs)
        return output  # type: ignore[no-any-return]
