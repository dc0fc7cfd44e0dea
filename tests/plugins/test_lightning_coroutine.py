"""A coroutine computes in its caller's thread state, one of the two at a time, and ends with its caller."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from plugins.lightning_module.coroutine import Coroutine, ThreadState

_WORD: ContextVar[str] = ContextVar("word", default="outside")


def test_it_takes_turns_with_its_caller() -> None:
    said: list[str] = []

    def body() -> None:
        for number in range(3):
            said.append(f"body {number}")
            coroutine.give_item(number)

    coroutine = Coroutine(body)
    while coroutine.advance():
        said.append(f"caller {coroutine.take_item()}")
    assert said == [f"{who} {number}" for number in range(3) for who in ("body", "caller")]


def states_inside() -> list[ThreadState]:
    seen: list[ThreadState] = []

    def body() -> None:
        seen.append(ThreadState.from_current_thread())
        coroutine.give_item(None)
        seen.append(ThreadState.from_current_thread())

    coroutine = Coroutine(body)
    while coroutine.advance():
        pass
    return seen


def test_it_has_the_state_of_torch_of_its_caller() -> None:
    plain = ThreadState.from_current_thread()
    assert states_inside() == [plain, plain]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.device("meta"):
        inside = ThreadState.from_current_thread()
        assert not inside.grad
        assert inside.autocast == (("cpu", torch.bfloat16),)
        assert inside.device == torch.device("meta")
        assert states_inside() == [inside, inside]
    with torch.inference_mode():
        assert states_inside()[0].inference

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        coroutine = Coroutine(lambda: coroutine.give_item(nn.Linear(2, 2)(torch.ones(1, 2)).exp()))
        coroutine.advance()
        coroutine.close()
    assert packed


def test_it_draws_the_random_numbers_and_has_the_variables_of_its_caller() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn = [torch.rand(1)]

    def body() -> None:
        assert _WORD.get() == "inside"
        drawn.append(torch.rand(1))
        coroutine.give_item(None)

    token = _WORD.set("inside")
    coroutine = Coroutine(body)
    coroutine.advance()
    drawn.append(torch.rand(1))
    assert not coroutine.advance()
    _WORD.reset(token)
    assert torch.equal(torch.cat(drawn), expected)


def test_an_error_is_that_of_the_caller() -> None:
    def body() -> None:
        coroutine.give_item(None)
        raise KeyError("lost")

    coroutine = Coroutine(body)
    assert coroutine.advance()
    with pytest.raises(KeyError, match="lost"):
        coroutine.advance()


def test_one_that_is_closed_ends_its_thread_and_what_it_holds() -> None:
    before = threading.active_count()
    ended: list[str] = []

    def body() -> None:
        try:
            coroutine.give_item(1)
            ended.append("never")
        finally:
            ended.append("finally")
            coroutine.give_item(2)  # never received

    coroutine = Coroutine(body)
    assert coroutine.advance()
    coroutine.close()
    coroutine.close()
    assert ended == ["finally"]
    assert threading.active_count() == before
    Coroutine(body).close()  # never started
