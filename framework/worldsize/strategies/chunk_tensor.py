"""A tensor of chunks: operations run on each chunk, or are refused.

The model runs as it is written: each operation sees chunks instead of whole sequences. Operations whose result would
depend on the division of chunks over ranks are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node
from torch.utils.hooks import RemovableHandle

from worldsize.core import ConfigError
from worldsize.seeds import get_generator_state, set_generator_state

if TYPE_CHECKING:
    from worldsize.strategies.sequence_chunks import ChunkLayout


@final
class Chunks(Tensor):
    """The chunks of a tensor on this rank; operations run on each of them.

    It has the shape of one part, and can be used like it.

    Attributes:
        parts: The tensors, as listed by ``chunk_layout.parts``.
        chunk_layout: The chunks of this rank.
        is_ragged: Whether the shapes of parts may differ, since they depend on values.
    """

    parts: Sequence[Tensor]
    chunk_layout: ChunkLayout
    is_ragged: bool

    def __new__(cls, parts: Sequence[Tensor], layout: ChunkLayout, *, is_ragged: bool = False) -> Chunks:
        first = parts[0]
        made: Any = Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        made.parts, made.chunk_layout, made.is_ragged = parts, layout, is_ragged
        return made  # type: ignore[no-any-return]

    def join(self, dim: int) -> Tensor:
        """Return the chunks of this rank as one tensor, for messages between stages."""
        return torch.cat(list(self.parts), dim)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _Call(func, args, kwargs or {}).run()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _create_function_error(str(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Chunks({list(self.parts)})"


register_pytree_node(  # FSDP and activation checkpointing look for tensors in arguments
    Chunks,
    lambda chunks: (list(chunks.parts), chunks.chunk_layout),
    lambda parts, layout: Chunks(list(parts), layout),
)


def call_by_part(function: Callable[..., Any], inputs: Tensor, *weights: Tensor | None) -> Any:
    """Call ``function`` with ``inputs`` and ``weights``: once, or if inputs are chunks, once for each part."""
    return _Call(function, (inputs, *weights), {}).call() if isinstance(inputs, Chunks) else function(inputs, *weights)


@final
class _Call:
    """A call of ``func`` with chunks among its arguments."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._chunks = [*_find_chunks(args), *_find_chunks(kwargs)]
        self._layout = self._chunks[0].chunk_layout
        self._is_ragged = func in _RAGGED or any(each.is_ragged for each in self._chunks)

    def run(self) -> Any:
        """Return the result: chunks, or a value that is equal for all chunks, such as a shape.

        Raises:
            ConfigError: the result would depend on the chunks of this rank.
        """
        if handler := _HANDLERS.get(self._func):
            return handler(self._layout, *self._args, **self._kwargs)
        self._is_ragged = self._is_ragged or self._selects_by_value()
        if self._is_ragged and self._func in _SHAPES:
            raise self._create_refusal("reads a shape that depends on values")
        self._refuse_write()
        return self._draw() if self._func in _DRAWING else self.call()

    def call(self) -> Any:
        """Call the function for each part."""
        count = len(self._layout.parts)
        args, kwargs = (_select_parts(each, count, self._layout) for each in (self._args, self._kwargs))
        return self._join([self._func(*own, **named) for own, named in zip(args, kwargs, strict=True)])

    def _selects_by_value(self) -> bool:
        """Return whether a mask selects elements, so that the shape of the result depends on values."""
        if self._func in (torch.where, Tensor.where):
            return len(self._args) + len(self._kwargs) == 1
        indices = self._args[1] if self._func is Tensor.__getitem__ else ()
        items = indices if isinstance(indices, tuple) else (indices,)
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in items)

    def _draw(self) -> Any:
        """Call the function for each part with its own random stream, derived from one number of the current stream."""
        device, count = self._chunks[0].parts[0].device, len(self._layout.parts)
        seed = int(torch.randint(2**62, (), device="cpu"))
        state, results = get_generator_state(device), []
        args, kwargs = (_select_parts(each, count, self._layout) for each in (self._args, self._kwargs))
        try:
            for (place, *_), own, named in zip(self._layout.parts, args, kwargs, strict=True):
                _seed_generator(seed + place, device)
                results.append(self._func(*own, **named))
        finally:
            set_generator_state(state, device)
        return self._join(results)

    def _join(self, results: Sequence[Any]) -> Any:
        first = results[0]
        if isinstance(first, Tensor):
            return Chunks(results, self._layout, is_ragged=self._is_ragged and first.ndim > 0)
        if isinstance(first, tuple | list) and _has_tensor(first):
            joined = [self._join(column) for column in zip(*results, strict=True)]
            return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
        if isinstance(first, RemovableHandle):
            return _Handles(results)
        if isinstance(first, int | float | tuple) and any(each != first for each in results):
            raise self._create_refusal("reads a shape or a value that differs between chunks")
        return first

    def _refuse_write(self) -> None:
        """Refuse writing chunks into a tensor that is not cut."""
        name = getattr(self._func, "__name__", "")
        is_write = name == "__setitem__" or name in _WRITING or (name.endswith("_") and not name.endswith("__"))
        targets = [*(self._args[:1] if is_write else ()), self._kwargs.get("out")]
        is_alone = len(self._layout.parts) == 1 and not self._layout.is_complete
        if not is_alone and any(isinstance(each, Tensor) and not isinstance(each, Chunks) for each in targets):
            raise ConfigError(
                f"{name} writes chunks of a sequence into a tensor that is not cut. Create it like an existing "
                f"tensor, with torch.zeros_like, or set {self._layout.name_key()}=1."
            )

    def _create_refusal(self, what: str) -> ConfigError:
        name = getattr(self._func, "__name__", str(self._func))
        return ConfigError(
            f"the model {what} ({name}), of sequences that are cut into chunks. Set {self._layout.name_key()}=1."
        )


def _find_chunks(node: Any) -> Iterator[Chunks]:
    if isinstance(node, Chunks):
        yield node
    elif isinstance(node, tuple | list):
        for each in node:
            yield from _find_chunks(each)
    elif isinstance(node, Mapping):
        for each in node.values():
            yield from _find_chunks(each)


def _select_parts(node: Any, count: int, layout: ChunkLayout) -> list[Any]:
    """Return ``node`` for each part; tensors without chunks are shared, with gradients summed over chunks."""
    if isinstance(node, Chunks):
        _check_own(node)
        return list(node.parts)
    if isinstance(node, Tensor):
        if layout.is_complete and node.requires_grad and torch.is_grad_enabled():
            return list(_Share.apply(layout, node))
        return [node] * count
    if type(node) in (tuple, list):
        columns = [_select_parts(each, count, layout) for each in node]
        return [type(node)(column[place] for column in columns) for place in range(count)]
    if isinstance(node, Mapping):
        named = {key: _select_parts(value, count, layout) for key, value in node.items()}
        return [{key: column[place] for key, column in named.items()} for place in range(count)]
    return [node] * count


def _check_own(chunks: Chunks) -> None:
    """Raise ConfigError if a custom autograd function returned ``chunks``, since it does not differentiate parts."""
    with torch._C.DisableTorchFunctionSubclass():
        if chunks.grad_fn is not None:
            raise _create_function_error("a custom autograd function")


def _create_function_error(what: str) -> ConfigError:
    return ConfigError(
        f"{what} was called on a sequence that is cut into chunks, which is not supported. Set strategy.context=1 and "
        "logical_context=1."
    )


def _has_tensor(node: Any) -> bool:
    return isinstance(node, Tensor) or (isinstance(node, tuple | list) and any(map(_has_tensor, node)))


class _Share(torch.autograd.Function):
    """Gives each part its own use of a tensor, so that gradients are summed in the tree, over all ranks."""

    @staticmethod
    def forward(ctx: Any, layout: ChunkLayout, shared: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(shared.view_as(shared) for _ in layout.parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        layout: ChunkLayout = ctx.layout
        refuse_second_gradient(layout)
        return None, layout.reduce_parts(gradients)


def refuse_second_gradient(layout: ChunkLayout) -> None:
    """Raise ConfigError in a backward pass that is differentiated again."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "a gradient over a sequence in chunks is differentiated again (create_graph=True), which is not "
            f"supported. Set {layout.name_key()}=1."
        )


def _seed_generator(seed: int, device: torch.device) -> None:
    generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


def _call_attention(*args: Any, **kwargs: Any) -> Tensor:
    from worldsize.strategies.chunk_attention import attend_by_chunk  # which imports this module

    return attend_by_chunk(*args, **kwargs)


def _iterate(_: ChunkLayout, chunks: Tensor) -> Iterator[Tensor]:
    return iter(torch.unbind(chunks, 0))


def _refuse(why: str) -> Callable[..., Any]:
    def refuse(layout: ChunkLayout, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"the model {why} of sequences that are cut into chunks. Set {layout.name_key()}=1.")

    return refuse


def _encode_classes(_: ChunkLayout, tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ConfigError("torch.nn.functional.one_hot of a sequence in chunks requires num_classes. Set it.")
    encoded: Tensor = call_by_part(partial(F.one_hot, num_classes=num_classes), tensor)
    return encoded


@final
class _Handles:
    """The handles of a hook on each part."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hook from all parts."""
        for each in self._handles:
            each.remove()


_READS_VALUES = (
    *(Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__, Tensor.__contains__),
    *(Tensor.__array__, Tensor.__dlpack__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.item, Tensor.tolist),
    *(Tensor.numpy, Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose),
)
_COMBINES_TOKENS = (
    *(F.multi_head_attention_forward, F.batch_norm, F.instance_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d),
    *(torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.logcumsumexp, Tensor.logcumsumexp),
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    *(F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.interpolate, torch.bincount, Tensor.bincount),
)
_RAGGED = frozenset(  # shapes of results depend on values
    (
        *(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select),
        *(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
        *(torch.repeat_interleave, Tensor.repeat_interleave),
    )
)
_SHAPE: Any = Tensor.shape
_SHAPES = frozenset((_SHAPE.__get__, Tensor.size, Tensor.numel, torch.numel, Tensor.nelement, Tensor.__len__))
_WRITING = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "and", "or", "xor"))
_DRAWING = frozenset(
    (
        *(getattr(F, each) for each in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu")),
        *(F.feature_alpha_dropout, F.gumbel_softmax, F.fractional_max_pool2d),
        *(getattr(torch, f"{each}{end}") for each in ("dropout", "alpha_dropout", "rrelu") for end in ("", "_")),
        *(getattr(torch, f"feature_{each}{end}") for each in ("dropout", "alpha_dropout") for end in ("", "_")),
        *(getattr(torch, each) for each in ("native_dropout", "bernoulli", "multinomial", "normal", "poisson")),
        *(getattr(torch, each) for each in ("binomial", "_standard_gamma", "_sample_dirichlet")),
        *(getattr(torch, f"{each}_like") for each in ("rand", "randn", "randint")),
        *(getattr(Tensor, each) for each in ("bernoulli", "bernoulli_", "multinomial", "uniform_", "normal_")),
        *(getattr(Tensor, each) for each in ("log_normal_", "exponential_", "random_", "geometric_", "cauchy_")),
    )
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _call_attention,
    F.one_hot: _encode_classes,
    Tensor.__iter__: _iterate,
    **dict.fromkeys(_READS_VALUES, _refuse("reads values")),
    **dict.fromkeys(_COMBINES_TOKENS, _refuse("combines the tokens, other than by scaled_dot_product_attention,")),
}
