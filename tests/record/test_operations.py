"""The first operation that differs is named in twenty-five pairs of steps with one planted difference each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from worldsize.errors import WorldsizeError
from worldsize.record.first_difference import find_first_difference, find_first_step
from worldsize.record.operations import STATES, OperationRecorder, list_streams, read_operations

FILE = Path(__file__)
Hook = Callable[[nn.Module, Any, Tensor], Tensor | None]


@dataclass(frozen=True)
class Step:
    """A training step of a tiny model, with a switch for each planted difference."""

    data: int = 0
    label: int = 0
    weight: float = 0.0
    seed: int = 1
    eps: float = 1e-5
    momentum: float = 0.1
    activation: Callable[[], nn.Module] = nn.GELU
    dropout: float = 0.25
    merge: str = "left"
    square: Callable[[Tensor], Tensor] = torch.square
    backward_factor: float = 2.0
    hook: Hook | None = None
    gradient_hook: Callable[[Tensor], Tensor] | None = None
    reduction: str = "mean"
    smoothing: float = 0.0
    double: bool = False
    max_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    optimizer_eps: float = 1e-8
    lr: float = 1e-2
    weight_decay: float = 1e-2

    def record(self, folder: Path, saved: str | None = None) -> Path:
        """Record the step to ``folder``."""
        self.run(lambda: OperationRecorder(folder, saved=saved))
        return folder

    def run(self, make_recorder: Callable[[], OperationRecorder | None], keep: Hook | None = None) -> nn.Module:
        """Run the step inside a recorder, or without; return the trained model. ``keep``: hook of the activation."""
        torch.manual_seed(0)
        model, images, labels = Net(self), torch.randn(6, 4), torch.randint(0, 3, (6,))
        images[1, 2] += self.data
        labels[3] = (labels[3] + self.label) % 3
        with torch.no_grad():
            model.head.weight[0, 0] += self.weight
        optimizer = torch.optim.AdamW(
            model.parameters(), self.lr, self.betas, self.optimizer_eps, weight_decay=self.weight_decay
        )
        if self.hook is not None:
            model.first.register_forward_hook(self.hook)
        if keep is not None:
            model.activation.register_forward_hook(keep)
        torch.manual_seed(self.seed)
        with make_recorder() or nullcontext() as recorder:
            if recorder:
                recorder.add_tensors("state", dict(model.named_parameters()))
            with recorder.compute(model, (images, labels), logical_rank=2) if recorder else nullcontext():
                loss = self.loss(model(images), labels)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)  # line: clip
            optimizer.step()
        return model

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.double() if self.double else logits  # line: double
        return functional.cross_entropy(  # line: loss
            logits, labels, reduction=self.reduction, label_smoothing=self.smoothing
        )


class Net(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8, eps=step.eps)
        self.batch = nn.BatchNorm1d(8, momentum=step.momentum)
        self.activation = step.activation()
        self.drop = nn.Dropout(step.dropout)
        self.merge = Merge(step.merge, step.square)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)  # line: first
        x = self.batch(self.norm(x))  # line: norm
        x = self.drop(self.activation(x))  # line: activation
        x = self.merge(x)
        x = Scale.apply(x, self.step.backward_factor)
        if self.step.gradient_hook:
            x.register_hook(self.step.gradient_hook)
        logits: Tensor = self.head(x)
        return logits


class Merge(nn.Module):
    def __init__(self, order: str, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order, self.square = order, square

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.square(x), torch.sin(x)  # line: square
        return (x + y) + z if self.order == "left" else x + (y + z)  # line: merge


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return x * 2.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.factor, None  # line: backward


def flip_bit(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return (output.view(torch.int32) ^ 1).view(torch.float32)  # line: flip


def flip_bit_in_memory(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.detach().numpy().view("int32")[0, 0] ^= 1


def scale_gradient(gradient: Tensor) -> Tensor:
    return gradient * 1.5  # line: gradient hook


def multiply_by_itself(x: Tensor) -> Tensor:
    return x * x  # line: product


@dataclass(frozen=True)
class Planted:
    """A changed switch, and the operation that must be named; a bar separates the two steps' values."""

    change: dict[str, Any]
    kind: str
    phase: str
    name: str
    module: str
    line: str  # part of the line

    def split_pairs(self) -> Iterator[tuple[str, ...]]:
        """Yield phase, name, module and line for both steps; those without a bar count for both."""
        pairs = (text.split(" | ") for text in (self.phase, self.name, self.module, self.line))
        return zip(*((pair[0], pair[-1]) for pair in pairs), strict=True)


def planted(kind: str, phase: str, name: str, module: str, line: str, **change: Any) -> Planted:
    return Planted(change, kind, phase, name, module, line)


CASES = {
    "data": planted("data", "data", "tensor", "data[0]", "", data=1),
    "labels": planted("data", "data", "tensor", "data[1]", "", label=1),
    "a weight": planted("state", "state", "tensor", "head.weight", "", weight=1e-3),
    "a bit of a layer's result, by an operation": planted(
        "operation", "forward", "aten.native_layer_norm | aten.view", "norm | first", "norm | flip", hook=flip_bit
    ),
    "a bit of a layer's result, in memory": planted(
        "input", "forward", "aten.native_layer_norm", "norm", "norm", hook=flip_bit_in_memory
    ),
    "epsilon of a norm": planted("result", "forward", "aten.native_layer_norm", "norm", "norm", eps=1e-6),
    "momentum of a norm": planted("result", "forward", "aten.native_batch_norm", "batch", "norm", momentum=0.2),
    "approximation of an activation": planted(
        "result", "forward", "aten.gelu", "activation", "activation", activation=partial(nn.GELU, approximate="tanh")
    ),
    "another activation": planted(
        "operation", "forward", "aten.gelu | aten.silu", "activation", "activation", activation=nn.SiLU
    ),
    "rate of dropout": planted("result", "forward", "aten.bernoulli_", "drop", "activation", dropout=0.5),
    "random numbers of dropout": planted("result", "forward", "aten.bernoulli_", "drop", "activation", seed=2),
    "no dropout": planted(
        "operation", "forward", "aten.bernoulli_ | aten.pow", "drop | merge", "activation | square", dropout=0.0
    ),
    "order of a sum": planted("operand", "forward", "aten.add", "merge", "merge", merge="right"),
    "a product instead of a square": planted(
        "operation", "forward", "aten.pow | aten.mul", "merge", "square | product", square=multiply_by_itself
    ),
    "precision of the loss": planted(
        "operation", "forward", "aten._log_softmax | aten._to_copy", "", "loss | double", double=True
    ),
    "reduction of the loss": planted("result", "forward", "aten.nll_loss_forward", "", "loss", reduction="sum"),
    "smoothing of the loss": planted(
        "operation", "backward | forward", "aten.nll_loss_backward | aten.sum", "", "loss", smoothing=0.1
    ),
    "a backward pass": planted("result", "backward", "aten.mul", "(model)", "backward", backward_factor=3.0),
    "a hook of a gradient": planted(
        "result", "backward", "aten.mul", "(model)", "backward | gradient hook", gradient_hook=scale_gradient
    ),
    "clipping": planted("result", "reduction", "aten.mul", "", "clip", max_norm=0.1),
    "first beta": planted("result", "optimizer", "aten.lerp_", "first.weight", "exp_avg.lerp_(", betas=(0.8, 0.999)),
    "second beta": planted(
        "result", "optimizer", "aten.addcmul_", "first.weight", "exp_avg_sq.mul_(", betas=(0.9, 0.99)
    ),
    "epsilon of the optimizer": planted(
        "result", "optimizer", "aten.add_", "first.weight", ".add_(eps)", optimizer_eps=1e-3
    ),
    "learning rate": planted(
        "result", "optimizer", "aten.addcdiv_", "first.weight", "param.addcdiv_(", lr=2e-2, weight_decay=5e-3
    ),
    "weight decay": planted("result", "optimizer", "aten.mul_", "first.weight", "param.mul_(", weight_decay=0.1),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Step().record(tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize("case", CASES)
def test_a_planted_difference_is_the_first_that_is_named(case: str, original: Path, tmp_path: Path) -> None:
    expected = CASES[case]
    found = find_first_difference(original, replace(Step(), **expected.change).record(tmp_path), step=1)
    assert found is not None
    assert found.kind == expected.kind
    for operation, (phase, name, module, line) in zip((found.first, found.second), expected.split_pairs(), strict=True):
        assert operation is not None
        assert (operation.phase, operation.module) == (phase, module)
        assert operation.name.split(".")[:2] == name.split(".")
        assert line in read_line(operation.line)


def read_line(named: str) -> str:
    """Return the text of a line of this file, or of torch."""
    file, _, number = named.rpartition(":")
    if not file:
        return ""
    root = Path(torch.__file__).parents[1] if file.startswith("torch/") else Path.cwd()
    return (root / file).read_text().splitlines()[int(number) - 1]


def test_a_value_changed_in_memory_is_traced_to_the_operation_that_computed_it(original: Path, tmp_path: Path) -> None:
    found = find_first_difference(original, Step(hook=flip_bit_in_memory).record(tmp_path), step=1)
    assert found is not None
    assert found.writer is not None
    assert (found.writer.name, found.writer.module) == ("aten.addmm.default", "first")


def test_a_step_recorded_twice_has_no_difference(original: Path, tmp_path: Path) -> None:
    assert find_first_difference(original, Step().record(tmp_path), step=1) is None


def test_recording_a_step_does_not_change_its_result(tmp_path: Path) -> None:
    plain, recorded = (Step().run(lambda: None), Step().run(lambda: OperationRecorder(tmp_path)))
    for one, other in zip(plain.state_dict().values(), recorded.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_the_size_of_a_difference_is_that_of_the_saved_results(original: Path, tmp_path: Path) -> None:
    changed = Step(activation=partial(nn.GELU, approximate="tanh"))
    found = find_first_difference(original, changed.record(tmp_path / "found"), step=1)
    assert found is not None
    assert found.first is not None
    key = f"{found.stream}/{found.first.number}"
    measured = found.measure(Step().record(tmp_path / "a", key), changed.record(tmp_path / "b", key))
    assert measured.ulp == count_ulps_of_activation(Step(), changed)


def count_ulps_of_activation(*steps: Step) -> int:
    """Count by IEEE 754: the integers of floats of one sign are in their order, and negative ones are mirrored."""
    results = list[numpy.ndarray[Any, Any]]()
    for step in steps:

        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            results.append(output.detach().numpy().copy())

        step.run(lambda: None, keep)
    integers = [array.view("int32").astype("int64") for array in results]
    ordered = [numpy.where(each >= 0, each, -(each & 0x7FFFFFFF)) for each in integers]
    return int(numpy.abs(ordered[0] - ordered[1]).max())


def test_updates_are_compared_between_runs_of_different_sizes(original: Path, tmp_path: Path) -> None:
    clipped = Step(max_norm=0.1).record(tmp_path / "clipped")
    found = find_first_difference(original, clipped, step=1, same_processes=False)
    assert found is not None
    assert (found.kind, found.stream) == ("reduction", "process_00000")


def test_the_first_step_that_differs_is_that_of_the_states_after_it(tmp_path: Path) -> None:
    def write(name: str, digests: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [f'{{"step": {step}, "digest": "{digest}"}}\n' for step, digest in enumerate(digests, 4)]
        (folder / STATES).write_text("".join(lines))
        return folder

    first = write("a", "abcd")  # of steps 4 to 7
    assert find_first_step(first, write("b", "abxy"), until=9) == 6
    assert find_first_step(first, write("c", "xyzz"), until=9) == 5
    assert find_first_step(first, write("d", "abcd"), until=9) == 9
    later = write("e", "????abcd")
    (later / STATES).write_text("".join((later / STATES).read_text().splitlines(keepends=True)[2:]))
    assert find_first_step(later, write("f", "????abxd"), until=20) == 10, "rows are joined by step"


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": "5", "digest": "b"}'])
def test_damaged_recordings_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / STATES).write_text(f'{{"step": 4, "digest": "a"}}\n{line}\n')
    with pytest.raises(WorldsizeError, match=f"{STATES} is damaged"):
        find_first_step(tmp_path, tmp_path, until=9)
    recorded = Step().record(tmp_path / "step")
    stream = list_streams(recorded)[0]
    with (recorded / f"{stream}.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(WorldsizeError, match=f"{stream}.jsonl is damaged"):
        find_first_difference(recorded, recorded, step=1)


def test_empty_tensors_are_not_taken_for_one_another(tmp_path: Path) -> None:
    with OperationRecorder(tmp_path):
        torch.ones(0)
        (torch.zeros(0) * 2).sum()
    (stream,) = list_streams(tmp_path)
    assert {writer for each in read_operations(tmp_path, stream) for writer in each.writers} == {""}


def test_uninitialized_memory_and_expanded_tensors_are_not_compared(tmp_path: Path) -> None:
    with OperationRecorder(tmp_path):
        x = torch.empty(4)
        x.fill_(1.0)
        torch.ones(1).expand(3, 1000).sum()
    (stream,) = list_streams(tmp_path)
    operations = list(read_operations(tmp_path, stream))
    assert [each.name for each in operations] == [
        *("aten.fill_.Scalar", "aten.ones.default", "aten.expand.default", "aten.sum.default")
    ]
    assert operations[0].inputs == []
    assert all(each.line.startswith(str(FILE.relative_to(Path.cwd()))) for each in operations)
