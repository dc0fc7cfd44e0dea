"""``train.py`` and ``worldsize train``: compose the configuration, then run it once, or once a sweep's point."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from omegaconf import DictConfig

from worldsize.config.compose import compose_and_call
from worldsize.driver.exit_process import leave
from worldsize.errors import WorldsizeError

CONFIG_ERROR = 2


def main() -> None:
    leave(train(sys.argv[1:]))


def train(arguments: Sequence[str]) -> int:
    """Exit code: 0 completed, 1 a process failed, 2 a configuration that cannot run, 128 + n ended by signal n."""
    codes: list[int] = []

    def task(cfg: DictConfig) -> None:
        codes.append(_run(cfg))

    try:
        compose_and_call(task, arguments)
    except WorldsizeError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return _swept(max(codes)) if codes else 0


def _swept(code: int) -> int:
    """Submit what a sweep has collected, if all of it was right."""
    from worldsize.driver.execute import submit_sweep

    try:
        return code or submit_sweep()
    except WorldsizeError as error:
        return refuse(error)


def _run(cfg: DictConfig) -> int:
    # imports torch, which takes seconds: a misspelt option is told before
    from worldsize.driver.execute import execute

    try:
        return execute(cfg)
    except WorldsizeError as error:
        return refuse(error)


def code_of(task: Callable[[DictConfig], int], arguments: Sequence[str]) -> int:
    """The largest of the codes that ``task`` gives for what ``arguments`` compose to, and of what is refused."""
    codes = [0]

    def guarded(cfg: DictConfig) -> None:
        try:
            codes.append(task(cfg))
        except WorldsizeError as error:  # Hydra would print where it was raised
            codes.append(refuse(error))

    try:
        compose_and_call(guarded, arguments)
    except WorldsizeError as error:
        codes.append(refuse(error))
    return max(codes)


def refuse(error: WorldsizeError) -> int:
    """Say why; the exit code."""
    print(error, file=sys.stderr)
    return CONFIG_ERROR
