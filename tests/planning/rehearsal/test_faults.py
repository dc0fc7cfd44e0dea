"""A rank that communicates otherwise than its peers is named, with both lines, before anything is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.rehearsal.composed import isolated
from tests.planning.rehearsal.faulty import FAULTS, Faulty, line
from worldsize.config.settings import Settings
from worldsize.planning.rehearsal.differences import deadlock, differences
from worldsize.planning.rehearsal.rank import Part
from worldsize.planning.rehearsal.ranks import rehearse

PROCESSES, RANK = 4, 2
STRATEGIES = ("ddp", "zero", "fsdp", "mesh")
PEERS = {"skip": "pair", "shape": "pair", "order": "pair", "dtype": "pair", "group": "pair", "branch": "one"}


def found(settings: Settings, fault: str) -> tuple[list[str], list[str | None]]:
    """Return the sentences on where ranks part, or wait for ever, and what each rank has failed with."""
    faulty = replace(settings, recipe=Faulty(fault, RANK))
    rehearsed = rehearse(faulty, range(PROCESSES), Part())
    parted, stuck = differences(rehearsed), deadlock(rehearsed)
    sentences = [*map(str, parted), *([str(stuck)] if stuck and not parted else [])]
    return sentences, [each.error for each in rehearsed]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_rank_that_differs_is_named_with_its_line_and_that_of_its_peers(strategy: str, fault: str) -> None:
    options = ("recipe=digits", f"strategy={strategy}", f"cluster.processes={PROCESSES}", "batch_size=32")
    sentences, _ = isolated(found, *options, given=(fault,))
    mine, _, peers = sentences[0].partition("). ")
    if fault == "branch":  # the rank follows from the order of data
        assert mine.startswith("rank ")
    else:
        assert mine.startswith(f"rank {RANK}: ")
    own = {"skip": "one"}.get(fault, fault)
    assert f"at {line(own)} (_talk)" in (mine if fault != "group" else "\n".join(sentences))
    assert f"at {line(PEERS[fault])} (_talk)" in peers


def times(settings: Settings, fault: str) -> int:
    """Return how often each rank is rehearsed."""
    counts: list[int] = []
    rehearse(replace(settings, recipe=Faulty(fault, RANK)), range(PROCESSES), Part(evaluates=False), note=counts.append)
    return counts.count(PROCESSES)


@pytest.mark.parametrize(("fault", "expected"), [("none", 1), ("shape", 2)])
def test_ranks_are_rehearsed_again_only_where_they_part_and_only_until_hearing_others_changes_nothing(
    fault: str, expected: int
) -> None:
    options = ("recipe=digits", "strategy=ddp", f"cluster.processes={PROCESSES}", "batch_size=32")
    assert isolated(times, *options, given=(fault,)) == expected


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp", "diloco", "local_sgd"])
def test_ranks_that_do_the_same_are_not_accused(strategy: str) -> None:
    options = ("recipe=digits", f"strategy={strategy}", f"cluster.processes={PROCESSES}", "batch_size=32")
    assert isolated(found, *options, "cluster.nodes=2", given=("none",)) == ([], [None] * PROCESSES)
