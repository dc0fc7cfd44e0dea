"""A process is notified of the end of its membership and of the next one, and does not wait longer than needed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from worldsize.errors import WorldsizeError
from worldsize.healing.membership import (
    NEWCOMER,
    Membership,
    MembershipChannel,
    MembershipEndedError,
    receive_message,
    send_message,
)

SECOND = Membership(2, (0, 2), (7, 7), {1: "killed by SIGKILL"})


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[MembershipChannel, Any]]:
    """A channel with waits of 120 s, or of the parametrized seconds, and its launcher's end."""
    ours, theirs = Pipe()
    seconds = getattr(request, "param", 120.0)
    channel = MembershipChannel(theirs, patience=seconds, detection=seconds)
    yield channel, ours
    channel.mark_finished()  # otherwise it would report this process as stuck while a later test waits
    ours.close()


def until(happened: threading.Event) -> None:
    assert happened.wait(120)


def test_a_membership_crosses_the_pipe(ends: tuple[MembershipChannel, Any]) -> None:
    channel, launcher = ends
    cut = threading.Event()
    channel.begin_membership(1, cut.set)
    channel.check_membership()
    send_message(launcher, {"stop": 1})
    until(cut)
    with pytest.raises(MembershipEndedError):
        channel.check_membership()
    threading.Timer(0.05, send_message, (launcher, SECOND.to_message())).start()
    assert channel.wait_for_membership(7) == SECOND
    assert receive_message(launcher) == {"stopped": 1, "step": 7}
    channel.check_membership()


@pytest.mark.parametrize("ends", [0.2], indirect=True)
def test_whoever_was_a_member_waits_for_the_next_membership_no_longer_than_its_patience(
    ends: tuple[MembershipChannel, Any],
) -> None:
    channel, _ = ends
    channel.begin_membership(3, lambda: None)
    with pytest.raises(WorldsizeError, match=r"membership 3 ended, but no new membership started within 0\.2 s"):
        channel.wait_for_membership(4)


@pytest.mark.parametrize("ends", [0.2], indirect=True)
def test_a_spare_waits_until_it_is_needed(ends: tuple[MembershipChannel, Any]) -> None:
    channel, launcher = ends
    threading.Timer(0.6, send_message, (launcher, SECOND.to_message())).start()
    assert channel.wait_for_membership(NEWCOMER) == SECOND


@pytest.mark.parametrize("ends", [0.2], indirect=True)
def test_an_error_is_not_that_of_a_lost_peer_if_the_launching_process_says_nothing(
    ends: tuple[MembershipChannel, Any],
) -> None:
    channel, launcher = ends
    channel.begin_membership(1, lambda: None)
    assert not channel.has_caused(ValueError("a mistake"))
    begun = time.monotonic()
    assert not channel.has_caused(RuntimeError("[gloo] Connection closed by peer"))
    assert time.monotonic() - begun >= 0.2
    assert receive_message(launcher) == {"lost": 1}


def test_an_error_is_that_of_a_lost_peer_if_the_launching_process_says_so(ends: tuple[MembershipChannel, Any]) -> None:
    channel, launcher = ends
    channel.begin_membership(1, lambda: None)
    told = list[object]()

    def answer() -> None:
        told.append(receive_message(launcher))
        send_message(launcher, {"stop": 1})

    (launching := threading.Thread(target=answer)).start()
    assert channel.has_caused(RuntimeError("[gloo] Connection closed by peer"))
    launching.join()
    assert told == [{"lost": 1}]


def test_the_first_steps_of_a_membership_are_reported_once(ends: tuple[MembershipChannel, Any]) -> None:
    channel, launcher = ends
    channel.begin_membership(5, lambda: None)
    for done in range(20, 26):
        channel.begin_step(done)
    assert [receive_message(launcher) for _ in range(2)] == [{"began": 5, "first": 20}, {"trained": 5}]
    assert not launcher.poll(0.05)


def test_the_newest_state_and_who_lacks_it() -> None:
    assert Membership(1, (4, 5, 6), (3, 5, NEWCOMER)).source == 1
    assert Membership(1, (4, 5, 6), (3, 5, NEWCOMER)).behind == [0, 2]
    assert Membership(1, (4, 5), (NEWCOMER, NEWCOMER)).source is None


STUCK = """
import os, sys, threading, time
from multiprocessing import Pipe
from types import ModuleType
from worldsize.healing.membership import MembershipChannel, send_message

ours, theirs = Pipe()
channel = MembershipChannel(theirs, patience=60.0, detection=1.0)
channel.begin_membership(1, lambda: None)
waits = ModuleType("worldsize.collectives.waits")
exec("def wait(seconds):\\n    import time\\n    time.sleep(seconds)", vars(waits))
send_message(ours, {"stop": 1})
if sys.argv[1] == "over":
    channel.mark_finished()
waits.wait(3.0 if sys.argv[1] == "over" else 120.0)
print("went on", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("state", "code"), [("waits", -signal.SIGKILL), ("over", 0)])
def test_a_process_that_waits_for_peers_alone_ends_itself_unless_it_needs_them_no_more(state: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", STUCK, state], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("it is blocked in a wait that cannot be interrupted" in done.stderr) == (code != 0)
