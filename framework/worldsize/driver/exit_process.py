"""The end of a command that has imported torch."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit without taking apart every imported module, which takes the interpreter 0.8 s once torch is among them."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
