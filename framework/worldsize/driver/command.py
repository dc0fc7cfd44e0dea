"""What commands share: composing the configuration, saying why something is refused, and exiting."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from omegaconf import DictConfig

from worldsize.config.compose import compose_and_call
from worldsize.errors import WorldsizeError

CONFIG_ERROR = 2


def call_composed(task: Callable[[DictConfig], int], arguments: Sequence[str]) -> int:
    """Call ``task`` with each configuration that ``arguments`` compose to; return the largest exit code."""
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
    """Say why; return the exit code."""
    print(error, file=sys.stderr)
    return CONFIG_ERROR


def exit_process(code: int) -> NoReturn:
    """Exit without taking apart every imported module, which takes the interpreter 0.8 s once torch is among them."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
