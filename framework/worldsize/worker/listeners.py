"""Creates the listeners of a process: those of its own, and those of the whole run if it is the one that logs."""

from __future__ import annotations

from functools import partial

from worldsize.config.settings import Settings
from worldsize.core import Listener
from worldsize.observe.events import EventLog
from worldsize.observe.health.files import AlertNews
from worldsize.observe.subprocess_listeners import SubprocessListeners
from worldsize.observe.timing import Timing
from worldsize.record.metrics import JsonLines
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import view
from worldsize.world.preemption import Preemption
from worldsize.world.roles import role_of
from worldsize.world.world import gang_of

_ENDING = 2.0  # seconds that a process needs to end when it waits for nothing


def listeners_of(settings: Settings, run: RunDirectory, global_rank: int, preemption: Preemption) -> list[Listener]:
    """Create the listeners of a process: every training process writes its timing, the first logs global events.

    If all processes serve, the run's first process leads and logs. In a gang that heals, its first member does, which
    need not be the first process.
    """
    role, rank = role_of(global_rank, settings.roles)
    own: list[Listener] = [] if settings.roles[role].serves else [Timing(run, rank=rank)]
    if settings.heals or global_rank != (gang_of(settings.roles) or [0])[0]:
        return own
    return [*own, *global_listeners(settings, run, preemption)]


def global_listeners(settings: Settings, run: RunDirectory, preemption: Preemption) -> list[Listener]:
    """Create the listeners of the whole run."""
    manifest = view(run.path).manifest  # the manifest's configuration has no secrets
    facts = {"run_id": run.id, "folder": run.path, "config": manifest["config"], "manifest": manifest}
    makers = {
        name: partial(make, **facts, group=settings.run.group) for name, make in settings.observe.listeners.items()
    }
    loggers = SubprocessListeners(
        makers,
        grace=lambda: max(1.0, preemption.seconds_left(settings.launcher.save_grace) - _ENDING),
        lock=run.listener_lock,
        alerts=AlertNews(run.events).new,
    )
    return [JsonLines(run.metrics), EventLog(run.events), loggers]
