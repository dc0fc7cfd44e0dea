"""Recording of a constructor's tensor operations on a tape, instead of their execution.

Large existing tensors that weights are computed from, such as arrays read from files, are kept by reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._functorch import config
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from worldsize.strategies.deferred.draws import InitialStates, PendingDraws, SeededError
from worldsize.strategies.deferred.fakes import (
    CallWatcher,
    CannotDeferError,
    FakeStorages,
    HostFakes,
    count_bytes,
    is_whole,
    unwrap_fake,
)
from worldsize.strategies.deferred.tape import Deferred, Storage, Tape, TapedCall

_aten = torch.ops.aten

_PLAINLY = "Initialize weights with torch.nn.init."
_LEAST = 1 << 16  # bytes: smaller non-random tensors, such as zeros, are created immediately

_UNINITIALISED = {_aten.empty.memory_format, _aten.empty_strided.default}
_RANDOM_FACTORIES = {  # these create new tensors
    _aten.rand.default,
    _aten.randn.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.normal.float_float,
}
_RANDOM_IN_PLACE = {  # the shape determines how many random numbers these use
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.bernoulli_.float,
}
_OVERWRITES = {*_RANDOM_IN_PLACE, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default}
_WRITES_BESIDES = {_aten.native_batch_norm.default: ("running_mean", "running_var")}  # missing from its schema
_AT_ONCE = {_aten.mkldnn_rnn_layer.default}  # returns different tensors for fakes
_DEFERS_ALWAYS = {
    *_UNINITIALISED,
    *_RANDOM_FACTORIES,
}  # of any size, since an immediate draw forces all pending draws


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates fakes within its context, and records on ``tape`` how to create the real tensors.

    Small non-random tensors are created immediately. If the constructor reads a value, the tensors that it depends on
    are created temporarily.

    Args:
        draws_twice: See ``at_once`` of :class:`PendingDraws`.

    Raises:
        CannotDeferError: within the context, for an operation that cannot be deferred.
        SeededError: within the context, see :class:`PendingDraws`.
    """

    def __init__(self, *, draws_twice: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.fakes = Tape(), FakeStorages()
        self._draws = PendingDraws(self.tape, at_once=draws_twice)
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # all fakes have address 0
            self._mode = HostFakes(allow_non_fake_inputs=True)
        self._calls = CallWatcher(self._execute_call)
        self.borrowed = BorrowedTensors()
        self._refusal: Exception | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and importing torch's compiler takes seconds

    def __enter__(self) -> Recorder:
        self._mode.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        self._calls.__exit__(*failure)  # type: ignore[no-untyped-call]
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._mode.__exit__(*failure)

    def finish_recording(self, kept: Iterable[Tensor]) -> InitialStates:
        """Reset the tape's generators to their initial states, and return these.

        Args:
            kept: The model's tensors, of any shapes.

        Raises:
            CannotDeferError: the constructor did something that is not on the tape.
            SeededError: as within the context.
        """
        # an exception reaches this line only if the constructor caught it
        failure = self._refusal or self._calls.failure
        if isinstance(failure, CannotDeferError | SeededError):
            raise failure
        if failure is not None:
            raise CannotDeferError(
                f"the constructor caught {type(failure).__name__}: {failure}", "Remove the failing call."
            )
        self.borrowed.check_unchanged()
        self._draws.check_kept(tensor for tensor in kept if self.fakes.describe(tensor) is None)
        return InitialStates.capture_states(self._draws.rewind_generators())

    def restore_generators(self) -> None:
        """Restore all generators to their states before the constructor used them."""
        for generator, state in self._draws.seen.items():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            with torch._C.DisableTorchFunction():  # these are not calls of the constructor
                does = self._put_off if self._should_defer(func, args, kwargs) else self._execute_call
                return does(func, args, kwargs)
        except Exception as error:  # any exception: ordinary tensors might not raise it
            self._refusal = self._refusal or error
            raise

    def _should_defer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether to defer ``func``: its arguments or result are deferred tensors."""
        tensors = _find_tensors((args, kwargs))
        if any(self.fakes.describe(tensor) is not None for tensor in tensors):
            return True
        if tensors or not _makes_on_host(func, kwargs):
            return False
        if func in _DEFERS_ALWAYS:
            return True
        if _is_random(func):  # the shape does not determine how many random numbers it uses
            return False
        shape = func(*args, **kwargs)  # returns a fake
        return isinstance(shape, Tensor) and shape.layout is torch.strided and shape.nbytes >= _LEAST

    def _execute_call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Execute ``func`` with temporary real tensors for its deferred arguments."""

        def materialize_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            described = self.fakes.describe(leaf)
            return unwrap_fake(leaf) if described is None else self.tape.create_tensor(described)

        asks = any(self.fakes.describe(tensor) is not None for tensor in _find_tensors((args, kwargs)))
        with unset_fake_temporarily():
            if asks or _is_random(func):
                self._draws.run_pending()
            if _is_random(func):
                self._draws.record_generator(_generator(kwargs))
            args, kwargs = tree_map(materialize_leaf, (tuple(args), dict(kwargs)))
            return func(*args, **kwargs)

    def _put_off(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record ``func`` on the tape, and return fakes."""
        if func in _AT_ONCE:
            return self._execute_call(func, args, kwargs)
        written = _find_written(func, args, kwargs)
        changes_others = [tensor for tensor in written if self.fakes.describe(tensor) is None]
        if changes_others or torch.Tag.data_dependent_output in func.tags:
            if len(changes_others) < len(written):
                raise CannotDeferError(f"the constructor modifies weights with {func}", _PLAINLY)
            return self._execute_call(func, args, kwargs)
        if _is_random(func) and func not in _RANDOM_IN_PLACE | _RANDOM_FACTORIES:
            raise CannotDeferError(f"the constructor draws random numbers with {func}", _PLAINLY)
        result = func(*args, **kwargs)
        self._mode.fake_tensor_converter.tensor_memo.clear()  # its weak references would prevent swaps in Module.to
        makes = [self._register_tensor(tensor) for tensor in _find_tensors(result)]
        if (written or any(makes)) and func not in _UNINITIALISED:
            if not _find_tensors((args, kwargs)):
                kwargs = {**kwargs, "dtype": result.dtype}  # the default may differ at replay
            self._record_call(func, args, kwargs, written=written, makes=makes)
        return result

    def _register_tensor(self, tensor: Tensor) -> Deferred | None:
        """Register and describe ``tensor`` if its storage is new, else return None."""
        nbytes = self.fakes.register_storage(tensor)
        if nbytes is None:
            return None
        self.tape.nbytes.append(nbytes)
        return self.fakes.describe(tensor)

    def _record_call(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        written: Sequence[Tensor],
        makes: Sequence[Deferred | None],
    ) -> None:
        kept_args, kept_kwargs = tree_map(self._convert_argument, (tuple(args), dict(kwargs)))
        writes = {described.storage for tensor in written if (described := self.fakes.describe(tensor)) is not None}
        reads = _storages((kept_args, kept_kwargs))
        if func in _OVERWRITES and is_whole(args[0]):
            reads -= writes - _storages((kept_args[1:], kept_kwargs))
        generator = _generator(kwargs) if _is_random(func) else None
        self.tape.add(
            TapedCall(
                func,
                kept_args,
                kept_kwargs,
                reads=frozenset(reads),
                writes=frozenset(writes),
                makes=makes,
                default_dtype=torch.get_default_dtype(),
                generator=generator,
            )
        )
        if generator is not None:
            with unset_fake_temporarily():
                self._draws.record_draw(generator)

    def _convert_argument(self, leaf: Any) -> Any:
        """Convert an argument to the form that the tape stores."""
        if not isinstance(leaf, Tensor):
            return leaf
        if (described := self.fakes.describe(leaf)) is not None:
            return described
        if count_bytes(leaf) < _LEAST:
            with unset_fake_temporarily():
                return unwrap_fake(leaf).detach().clone()  # copied, since its owner may change it
        with unset_fake_temporarily():
            leaf = unwrap_fake(leaf)
            self.borrowed.add(leaf)
        return leaf


def _find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tree: Any) -> set[Storage]:
    return {leaf.storage for leaf in tree_leaves(tree) if isinstance(leaf, Deferred)}


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())  # Python functions lack tags


def _generator(kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the generator of a random operator."""
    generator: torch.Generator = kwargs.get("generator") or torch.default_generator
    return generator


def _makes_on_host(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``func`` is a factory that creates tensors on the host."""
    if not any(argument.name == "device" for argument in func._schema.arguments):
        return False
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"


def _find_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that ``func`` writes to."""
    changed = []
    for index, argument in enumerate(func._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in _WRITES_BESIDES.get(func, ()):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            changed += _find_tensors(value)
    return changed


@final
class BorrowedTensors:
    """Existing tensors from which weights are computed later; they must not change until then."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, int, bytes | None]] = []  # with their versions and digests

    def add(self, tensor: Tensor) -> None:
        """Keep a reference to ``tensor``, of any shape, and record its version and digest."""
        self._tensors.append((tensor, tensor._version, _hash_tensor(tensor)))

    def list_tensors(self) -> list[Tensor]:
        """Return the borrowed tensors, in the order of their use."""
        return [tensor for tensor, *_ in self._tensors]

    def check_unchanged(self) -> None:
        """Raise CannotDeferError if a tensor has changed since it was added."""
        for tensor, version, digest in self._tensors:
            if tensor._version != version or _hash_tensor(tensor) != digest:
                raise CannotDeferError(
                    "the constructor modifies a tensor after creating weights from it",
                    "Read each weight into separate memory.",
                )


def _hash_tensor(tensor: Tensor) -> bytes | None:
    """Return a digest of ``tensor`` if code outside torch, such as NumPy, may write to it.

    Return None if only torch can write to it, since its version counter then suffices.
    """
    if tensor.layout is not torch.strided or tensor.untyped_storage().resizable():
        return None
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).digest()
