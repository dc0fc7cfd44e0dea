"""Coroutines based on threads: a function alternates with its caller, and can pause inside any call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, final

import torch


class _Closed(BaseException):
    """Raised in the function of a closed coroutine, to end the function."""


@final
@dataclass(frozen=True)
class ThreadState:
    """Snapshot of torch's thread-local settings, to apply in a different thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    device: torch.device
    saved_tensors: Any
    """Hooks that pack and unpack tensors saved for backward. None if there are none."""
    threads: int
    stream: Any
    """Current CUDA stream, which determines the device. None if CUDA is not in use."""

    @staticmethod
    def from_current_thread() -> ThreadState:
        """Return the settings of the calling thread."""
        kinds = ("cpu", "cuda")
        is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return ThreadState(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
            saved_tensors=torch._C._autograd._top_saved_tensors_default_hooks(False),
            threads=torch.get_num_threads(),
            stream=torch.cuda.current_stream() if is_cuda else None,
        )

    @contextmanager
    def apply_to_thread(self) -> Iterator[None]:
        """Apply these settings to the calling thread, which must be new."""
        torch.set_num_threads(self.threads)
        with ExitStack() as stack:
            if self.stream is not None:
                torch.cuda.set_device(self.stream.device)
                stack.enter_context(torch.cuda.stream(self.stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.saved_tensors is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors))
            yield


@final
class Coroutine:
    """A call of ``body`` that pauses at each :meth:`give_item` and resumes at :meth:`advance`.

    Exactly one of the two threads runs at any time. ``body`` starts with the torch thread-local state and context
    variables of the first caller of :meth:`advance`. Random generators are process-wide.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        self._body: Callable[[], None] | None = body
        self._thread: threading.Thread | None = None
        self._resumed, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._item: Any = None
        self._error: BaseException | None = None
        self._is_closed = self._has_ended = False

    def advance(self) -> bool:
        """Run the function until its next :meth:`give_item`. Returns False once it has ended.

        Raises:
            BaseException: raised by the function.
        """
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(
                target=run, args=(self._run_body, ThreadState.from_current_thread()), daemon=True
            )
            self._thread.start()
        else:
            self._resumed.release()
        self._stopped.acquire()
        if not self._has_ended:
            return True
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return False

    def take_item(self) -> Any:
        """Return the value passed to the last :meth:`give_item`, and drop the reference to it."""
        item, self._item = self._item, None
        return item

    def give_item(self, item: Any) -> None:
        """Pass ``item`` to :meth:`advance`, and pause until its next call. Called by ``body``."""
        if not self._is_closed:
            self._item = item
            self._stopped.release()
            self._resumed.acquire()
        if self._is_closed:
            raise _Closed
        torch.clear_autocast_cache()  # weights may have changed meanwhile

    def close(self) -> None:
        """End the function at the point where it is paused, and join its thread."""
        if self._thread is None or self._has_ended:
            self._body = None
            return
        self._is_closed = True
        self._resumed.release()
        self._thread.join()
        self._item = self._error = None

    def _run_body(self, state: ThreadState) -> None:
        try:
            assert self._body is not None, "it begins once"
            with state.apply_to_thread():
                self._body()
        except BaseException as error:  # re-raised in the caller
            self._error = error
        finally:
            self._body = None  # breaks reference cycles, to free memory without garbage collection
            self._has_ended = True
            self._stopped.release()
