"""``python -m worldsize``: the same as the ``worldsize`` command."""

from __future__ import annotations

import signal
import sys

from worldsize.world.preemption import SIGNALS

if sys.argv[1:2] == ["agent"]:  # a scheduler may signal it while it still imports; its gang unblocks them
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

from worldsize.app import main

main()
