"""Records the operations of a training step: their names, digests, modules and source lines, one JSON line each.

Each logical rank has a file for its forward and backward passes, and each process one for the rest: the state before
the step, sums of gradients, and updates. Files are written as the step runs. Memory holds a copy of the current tensor,
and a short entry for each operation and each tensor that it writes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldsize.checkpoint.safetensors import DTYPES
from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.record.json_lines import JsonRows, Row, wrap_read_errors

Phase = Literal["state", "data", "forward", "backward", "reduction", "optimizer", "new state"]
_FIELDS: Mapping[str, type] = {
    **dict.fromkeys(("phase", "name", "module", "line", "arguments"), str),
    **dict.fromkeys(("inputs", "results", "tensors", "writers"), list),
    "number": int,
}
_COLLECTIVES = ("c10d", "_c10d_functional")  # may return before their results are complete
_UNSET = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
_SAME_BITS = ("detach", "detach_", "alias", "lift_fresh", *_UNSET)  # not recorded
STATES = "states.jsonl"  # one line per step with the digest of the state after it
MODEL = "(model)"  # path of the whole model
TENSOR = "tensor"  # name of a tensor that a step starts or ends with
_OVERWRITES = (
    *("copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"),
    *("geometric_", "cauchy_", "_foreach_copy_", "_foreach_zero_", "_fill_mem_eff_dropout_mask_"),
)
_UNDECLARED = {"running_mean", "running_var"}  # arguments that batch norms change without saying so in their schema
_LONGEST = 200  # maximum characters of the arguments
_LARGEST = 4 << 30  # maximum bytes of a saved tensor
_TORCH, _FRAMEWORK = Path(torch.__file__).parent, Path(__file__).parents[1]
_OPTIMIZERS, _ENGINE = f"{_TORCH}/optim/", f"{_TORCH}/autograd/graph.py"
_MODULE_CALL = (f"{_TORCH}/nn/modules/module.py", "_call_impl")
_INTERNAL = (f"{_TORCH}/", f"{_FRAMEWORK}/", f"{Path(contextmanager.__code__.co_filename).parent}/", "<")
_active: ContextVar[OperationRecorder | None] = ContextVar("active recorder", default=None)


@final
@dataclass(frozen=True)
class OperationRecord:
    """An operation of a step, or a tensor that the step starts or ends with.

    Attributes:
        number: Position among the operations of its process, from 0.
        phase: The part of the step.
        name: Name of the operator, e.g. ``aten.addmm.default``; "tensor" for a tensor at the start or end of the step.
        module: Path of the module, or in the optimizer the name of a parameter. In the backward pass, the module of the
            forward operation.
        line: Innermost source line outside of torch and worldsize. In the backward pass, the forward operation's.
        inputs: Digest of each input before the operation; "" if unknown.
        results: Digest of each result; of a view, its shape, strides and offset.
        tensors: Dtype and shape of each result.
        arguments: Other arguments, abbreviated.
        writers: The operation that wrote each input, as STREAM/NUMBER; "" if none did in this step.
    """

    number: int
    phase: Phase
    name: str
    module: str
    line: str
    inputs: Sequence[str]
    results: Sequence[str]
    tensors: Sequence[str]
    arguments: str = ""
    writers: Sequence[str] = ()


def list_streams(folder: Path) -> list[str]:
    """Return the names of the recorded files, logical ranks last."""
    return sorted(file.stem for file in folder.glob("*.jsonl") if file.name.startswith(("process_", "rank_")))


def read_operations(folder: Path, stream: str) -> Iterator[OperationRecord]:
    """Yield the operations of a stream one at a time; none if the file is missing.

    Raises:
        WorldsizeError: the file is damaged.
    """
    return (OperationRecord(**row) for row in _read_rows(folder / f"{stream}.jsonl", _is_operation))


def read_states(folder: Path) -> dict[int, str]:
    """Return the digest of the state after each step, in order.

    Raises:
        WorldsizeError: the file is damaged.
    """
    return {row["step"]: row["digest"] for row in _read_rows(folder / STATES, _is_state)}


def _read_rows(path: Path, is_valid: Callable[[Row], bool]) -> Iterator[Row]:
    rows = JsonRows(path, is_valid=is_valid)
    with wrap_read_errors(path.parent):
        for row in chain(rows, [None]):
            if rows.damaged:
                raise WorldsizeError(f"{path} is damaged. Compare the runs again.")
            if row is not None:
                yield row


def _is_operation(row: Row) -> bool:
    if row.keys() != _FIELDS.keys() or not all(isinstance(row[key], kind) for key, kind in _FIELDS.items()):
        return False
    return all(isinstance(each, str) for key, kind in _FIELDS.items() if kind is list for each in row[key])


def _is_state(row: Row) -> bool:
    return isinstance(row.get("step"), int) and isinstance(row.get("digest"), str)


@final
class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations inside its context to ``folder``.

    Args:
        folder: Folder of the files.
        process: This process's rank.
        saved: ``STREAM/NUMBER`` of an operation whose inputs and results are saved (:func:`load_saved`).
    """

    def __init__(self, folder: Path, *, process: int = 0, saved: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._process, self._saved = folder, f"process_{process:05d}", saved
        self._files: dict[str, TextIO] = {}
        self._number, self._is_paused = 0, False
        self._modules: dict[nn.Module, str] = {}
        self._stream, self._computes, self._updates = self._process, False, False
        self._parameter, self._names = "", dict[int, str]()  # of the optimizer; by address
        self._origins: dict[int, tuple[str, str]] = {}  # module and line by sequence number of the autograd node
        self._writers: dict[int, str] = {}  # last operation that wrote an address, as STREAM/NUMBER
        self._hooks: list[Any] = []
        self._outermost: FrameType | None = None  # whose block this context is

    def __enter__(self) -> OperationRecorder:
        here = inspect.currentframe()
        self._outermost = here.f_back if here else None
        _active.set(self)
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(self._end_update),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._outermost = None
        _active.set(None)
        for hook in self._hooks:
            hook.remove()
        for file in self._files.values():
            file.close()

    @contextmanager
    def compute(self, model: nn.Module, data: Any, *, logical_rank: int) -> Iterator[None]:
        """Attribute operations in this block, and of later backward passes, to a logical rank's pass over ``data``."""
        if self._is_paused:
            yield
            return
        if not self._modules:
            self._modules = {module: name or MODEL for name, module in model.named_modules()}
            self._names = {address: name for name, each in model.named_parameters() if (address := _get_address(each))}
        rank = f"rank_{logical_rank:05d}"
        if rank not in self._files:
            tensors = {f"data[{index}]": tensor for index, tensor in enumerate(_list_tensors(data))}
            self.add_tensors("data", tensors, stream=rank)
        if rank != self._stream:
            self._origins.clear()
        self._stream, self._computes = rank, True
        try:
            yield
        finally:
            self._computes = False

    def add_tensors(self, phase: Phase, tensors: Mapping[str, Tensor], *, stream: str | None = None) -> None:
        """Record tensors that the step starts or ends with, by name."""
        with self.pause():
            for name, tensor in tensors.items():
                row = {"phase": phase, "name": TENSOR, "module": name, "line": "", "inputs": []}
                self._write_row(stream or self._process, row, [tensor], [digest_tensor(tensor)])

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not record the operations in this block."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused or _get_short_name(func) in _SAME_BITS or func.namespace == "profiler":
            result = func(*args, **(kwargs or {}))
            if _get_short_name(func) in _UNSET:
                self._writers |= dict.fromkeys(_list_addresses(_list_tensors(result)), "")
            return result
        declared = func._schema.arguments
        arguments = dict(zip((each.name for each in declared), args, strict=False)) | (kwargs or {})
        changed = {each.name for each in declared if each.alias_info and each.alias_info.is_write}
        changed |= arguments.keys() & _UNDECLARED
        writes = _list_tensors([value for name, value in arguments.items() if name in changed])
        read = arguments.keys() - (set() if _reads_results(func) else changed)
        reads = _list_tensors([value for name, value in arguments.items() if name in read])
        phase, stream = self._find_phase(func)
        module, line = self._find_origin(phase, [*reads, *writes])
        row: Row = {"phase": phase, "name": str(func), "module": module, "line": line}
        row |= {"inputs": [digest_tensor(tensor) for tensor in reads] if _reads_memory(func) else []}
        row |= {"arguments": _describe_arguments(arguments), "writers": [self._get_writer(tensor) for tensor in reads]}
        is_saved = self._saved == f"{stream}/{self._number}"
        if is_saved:
            _save_tensors(self._folder, "inputs", reads)
        result = func(*args, **(kwargs or {}))
        outputs = _list_tensors(result)
        outputs += [tensor for tensor in writes if not any(tensor is each for each in outputs)]
        if func.namespace in _COLLECTIVES:
            digests = [""] * len(outputs)
        elif func.is_view:
            digests = [f"{tuple(each.shape)} {each.stride()} {each.storage_offset()}" for each in outputs]
        else:
            digests = [digest_tensor(tensor) for tensor in outputs]
            digests += [repr(result)] if isinstance(result, bool | int | float | complex) else []
        if is_saved:
            _save_tensors(self._folder, "results", outputs)
        self._write_row(stream, row, outputs, digests, writer=row["writers"][0] if func.is_view else None)
        return result

    def _write_row(
        self, stream: str, row: Row, outputs: Sequence[Tensor], digests: Sequence[str], *, writer: str | None = None
    ) -> None:
        """Append an operation to its stream; ``writer``: the operation that wrote its outputs, if not itself."""
        row = {"number": self._number, "arguments": "", "writers": [], **row, "results": digests}
        row["tensors"] = [f"{_get_name(each.dtype)}{list(each.shape)}" for each in outputs]
        if stream not in self._files:
            self._files[stream] = (self._folder / f"{stream}.jsonl").open("w")
        self._files[stream].write(json.dumps(row) + "\n")
        written = f"{stream}/{self._number}" if writer is None else writer
        self._writers |= dict.fromkeys(_list_addresses(outputs), written)
        self._number += 1

    def _get_writer(self, tensor: Tensor) -> str:
        return self._writers.get(_get_address(tensor), "")

    def _find_phase(self, func: Any) -> tuple[Phase, str]:
        """Return the phase of the current operation, and its stream."""
        node = _get_node()
        if node is not None:
            is_sum = node.name().endswith("AccumulateGrad") or func.namespace in _COLLECTIVES
            return "backward", self._process if is_sum else self._stream
        if self._updates:
            return "optimizer", self._process
        return ("forward", self._stream) if self._computes else ("reduction", self._process)

    def _find_origin(self, phase: Phase, tensors: Sequence[Tensor]) -> tuple[str, str]:
        """Return the module and the source line of the current operation."""
        module, line = self._find_frame(phase)
        if phase == "optimizer":
            names = (self._names.get(address) for address in _list_addresses(tensors))
            self._parameter = next(filter(None, names), self._parameter)  # otherwise a temporary of the same parameter
            return self._parameter, line
        if phase == "backward":
            node = _get_node()
            if (variable := getattr(node, "variable", None)) is not None:
                return self._names.get(_get_address(variable), ""), line
            origin = self._origins.get(node._sequence_nr(), ("", ""))
            module, line = module or origin[0], line or origin[1]
        # autograd numbered the node of this operation, if any, just before it dispatched the operation
        self._origins.setdefault(torch._C._autograd._get_sequence_nr() - 1, (module, line))
        return module, line

    def _find_frame(self, phase: Phase) -> tuple[str, str]:
        """Return the innermost module that is called, and the innermost source line of the user's code.

        In the optimizer, its code in torch counts as the user's. Otherwise, the line is in worldsize if the user's code
        is not involved, as in a sum of gradients; in the backward pass it is empty then.
        """
        frame = inspect.currentframe()
        module, line, inner = None, "", ""
        while frame is not None and not (module is not None and line):
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if phase == "backward" and file == _ENGINE:
                break
            if module is None and (file, name) == _MODULE_CALL:
                module = self._modules.get(frame.f_locals["self"])
            if not line and (not file.startswith(_INTERNAL) or (phase == "optimizer" and file.startswith(_OPTIMIZERS))):
                line = _describe_line(file, frame.f_lineno)
            if not inner and file.startswith(f"{_FRAMEWORK}/") and file != __file__:
                inner = _describe_line(file, frame.f_lineno)
            frame = None if frame is self._outermost else frame.f_back
        return module or "", line or ("" if phase == "backward" else inner)

    def _begin_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updates = True
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = self._names.get(_get_address(parameter), "")
            tensors = _list_tensors([parameter.grad, list(optimizer.state.get(parameter, {}).values())])
            self._names |= dict.fromkeys(_list_addresses(tensors), name)

    def _end_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updates = False


@contextmanager
def pause_recording() -> Iterator[None]:
    """Do not record the operations in this block, such as a pass whose gradients are discarded."""
    with recorder.pause() if (recorder := _active.get()) else nullcontext():
        yield


@cache
def _describe_line(file: str, number: int) -> str:
    """Return a line relative to the working directory, or to the folder of torch or worldsize."""
    roots = (_TORCH.parent, _FRAMEWORK.parent, Path.cwd())
    shown = next((Path(file).relative_to(root) for root in roots if Path(file).is_relative_to(root)), file)
    return f"{shown}:{number}"


def _describe_arguments(arguments: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str | list)}
    words = [f"{name}={value}" for name, value in plain.items() if not _list_tensors(value)]
    return ", ".join(words)[:_LONGEST]


def _get_node() -> Any:
    """Return the node that autograd's backward pass evaluates in this thread; None outside of one."""
    return torch._C._current_autograd_node()


def _reads_memory(func: Any) -> bool:
    """Return whether an operation reads all its inputs; the schemas of collectives list outputs among them."""
    return not func.is_view and (func.namespace not in _COLLECTIVES or _get_short_name(func).startswith("allreduce"))


def _reads_results(func: Any) -> bool:
    """Return whether an operation reads the tensors that it changes; if not, they may be uninitialized."""
    name = _get_short_name(func)
    return name.endswith("_") and name not in _OVERWRITES


def _get_short_name(func: Any) -> str:
    """Return the name of an operator without its namespace and overload, e.g. "addmm"."""
    return str(func).split(".")[1]


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _get_address(tensor: Tensor) -> int:
    """Return the address of a dense tensor; 0 for empty and other tensors, which share no memory."""
    return tensor.data_ptr() if _is_dense(tensor) else 0


def _list_addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [address for address in map(_get_address, tensors) if address]


def digest_tensor(tensor: Tensor) -> str:
    """Return a digest of the bits of a dense or sparse tensor, of any shape; "" for other tensors."""
    if type(tensor) is Tensor and tensor.layout is torch.sparse_coo:
        return digest_tensor(tensor._indices()) + digest_tensor(tensor._values())
    return hashlib.blake2b(_get_bytes(tensor), digest_size=8).hexdigest() if _is_dense(tensor) else ""


def _get_bytes(tensor: Tensor) -> Any:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # expanded
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    row_n = plain.as_strided((plain.numel(),), (1,))  # reshape() could keep a stride of 0
    return row_n.view(torch.uint8).numpy()


def _save_tensors(folder: Path, kind: str, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if _is_dense(tensor) and tensor.dtype in DTYPES.values() and tensor.nbytes <= _LARGEST:
            (folder / f"{kind}_{index}_{_get_name(tensor.dtype)}.bin").write_bytes(_get_bytes(tensor.clone()))


def load_saved(folder: Path, kind: Literal["inputs", "results"], index: int) -> Tensor | None:
    """Load a saved input or result, flattened; None if it was not saved.

    Raises:
        WorldsizeError: the file is damaged.
    """
    file = next(folder.glob(f"{kind}_{index}_*.bin"), None)
    if file is None:
        return None
    with wrap_read_errors(folder):
        data, dtype = read_regular(file, at_most=_LARGEST), DTYPES[file.stem.split("_", 2)[2]]
        if len(data) % dtype.itemsize:
            raise ValueError(f"{file.name} has {len(data)} bytes")
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _get_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
