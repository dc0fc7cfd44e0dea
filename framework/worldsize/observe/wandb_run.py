"""Opening a run of Weights & Biases: where it goes, and what happens when no server takes it."""

from __future__ import annotations

import logging
from typing import Any, Literal

import wandb

from worldsize.observe.wandb import Mode

_logger = logging.getLogger(__name__)


def start(mode: Mode, **facts: Any) -> wandb.Run:
    """Start a run; with "auto" one that no server takes is kept for ``wandb sync``.

    Raises:
        wandb.Error: the run could not be started, and is not one that "auto" chose to have online.
    """
    wandb.setup(wandb.Settings(silent=True))  # else finding a key asks the server whose it is: 5 s offline
    chosen = _mode(mode)
    try:
        return _init(chosen, **facts)
    except wandb.Error as error:
        if mode != "auto" or chosen != "online":
            raise
        reason = str(error).splitlines()[0]
        _logger.warning("wandb is offline for this run: %s", reason)
        wandb.teardown()  # or its service says that the run's id is in use
        return _init("offline", **facts)


def _init(mode: Literal["online", "offline", "disabled"], **facts: Any) -> wandb.Run:
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        # a run that is asked to end at once waits 30 s for us; without a server only a busy machine takes long
        init_timeout=15.0 if mode == "online" else 120.0,
    )
    return wandb.init(mode=mode, resume="allow", save_code=False, settings=settings, **facts)


def _mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    if mode != "auto":
        return mode
    chosen = wandb.setup().settings.mode  # what WANDB_MODE or wandb's own settings say
    if chosen in ("offline", "disabled"):
        return chosen
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
