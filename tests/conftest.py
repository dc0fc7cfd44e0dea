"""Configuration of all tests: environment, marks and order. Fixtures are in tests/support."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings

from tests.support import warm
from tests.support.zygote import collapse, run_zygote

settings.register_profile("busy", deadline=None)  # a busy machine may be slow
settings.load_profile("busy")
pytest_plugins = ["tests.support.runs", "tests.support.clusters"]

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # many containers set it: each process would compile its imports
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported, after this file and not by the
# process that only distributes tests; threads of many small models would spin for the same few cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background job; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Start the zygote once for all processes of a test run; it imports nothing before its first request."""
    if warm.ZYGOTE in os.environ:
        return
    stack = ExitStack()
    os.environ[warm.ZYGOTE] = str(stack.enter_context(run_zygote()))

    def end() -> None:
        del os.environ[warm.ZYGOTE]
        stack.close()

    config.add_cleanup(end)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collection: it would scan all of them repeatedly and find nothing."""
    gc.disable()
    yield
    if torch := sys.modules.get("torch"):  # not in the process that only distributes tests
        # the first backward pass of a process starts a thread for each kind of device; where there are any, gradients
        # cannot be computed in a fork later. So it comes before the first test that makes a kind of device known
        torch.ones((), requires_grad=True).backward()
    gc.freeze()
    gc.enable()
    collapse()  # tests fork this process


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries would report unfreed objects at exit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that may take minutes: they use a cluster or set a timeout."""
    items.sort(key=lambda item: not ("clusters" in item.path.parts or item.get_closest_marker("timeout")))
