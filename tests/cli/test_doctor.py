"""Doctor exits and shows the facts gathered so far if the first host cannot leave a report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worldsize.cli import doctor
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.config.purpose import Examine
from worldsize.core import Cluster
from worldsize.launch import examine
from worldsize.plan.doctor.findings import write_facts
from worldsize.plan.doctor.report import report_in
from worldsize.record.run_directory import RunDirectory


def test_it_waits_until_hosts_begin_and_gives_up_on_a_report_once_they_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, findings = [0.0], tmp_path / "findings"
    facts: dict[int, tuple[str, dict[str, Any]]] = {601: ("node_00000", {"node": 0}), 1100: ("meeting", {"hosts": []})}

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for at in [at for at in facts if at <= now[0]]:
            write_facts(findings, *facts.pop(at))

    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    doctor.wait_for_report(findings, 500.0)
    assert now[0] == pytest.approx(1600, abs=2 * doctor._POLL), "nothing at first, and then something new"
    assert "No report from the first host: timed out after 500 s without new findings." in capsys.readouterr().out


def test_it_ends_with_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_facts(tmp_path, "node_00000", {"node": 0})
    write_facts(tmp_path, "report", {"checks": []})
    doctor.wait_for_report(tmp_path, 0.0)
    assert capsys.readouterr().out == ""


def test_a_report_that_cannot_be_written_is_in_the_hosts_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe: Any = SimpleNamespace(model=lambda: torch.nn.Linear(2, 2))
    examine.leave_report(recipe, Cluster("test", 2, 2, "cpu", "gloo"), RunDirectory(tmp_path / "absent"))
    shown = capsys.readouterr().out
    report = report_in(shown)
    assert report is not None
    assert not report.ok
    assert "worldsize doctor" in shown.splitlines()[0]


@pytest.mark.parametrize(("hosts", "expected"), [("a,b,c,d,e", {}), ("a,b,c,d,e,f", {"rack": 2})])
def test_spare_nodes_are_examined_also_if_racks_do_not_divide_them(hosts: str, expected: dict[str, int]) -> None:
    spare = len(hosts.split(",")) - 4
    words = ["recipe=digits", "+cluster=ssh", f"cluster.hosts=[{hosts}]", f"cluster.spare_nodes={spare}"]
    cfg = compose_only([*words, "+cluster.tiers.rack=2", "strategy.on_failure=heal"])
    settings = build_settings(cfg)
    assert settings.cluster.tiers == {"rack": 2}, "four of them train"
    examined = build_settings(cfg, doctor.add_spare_nodes(Examine(), cfg, settings)).cluster
    assert (examined.nodes, examined.spare_nodes, examined.tiers) == (4 + spare, 0, expected)


def test_spare_nodes_are_examined_also_if_the_strategy_could_not_train_on_as_many() -> None:
    spares = ["cluster.spare_nodes=1", "cluster.spares=1"]
    words = ["recipe=stdlib_lm", "+cluster=ssh", "cluster.hosts=[a,b,c,d,e]", *spares]
    cfg = compose_only([*words, "strategy=mesh", "strategy.pipeline=2", "strategy.on_failure=heal"])
    settings = build_settings(cfg, doctor.add_spare_nodes(Examine(), cfg, build_settings(cfg)))
    assert settings.roles["worker"].processes == 5
    assert settings.cluster.spares == 0, "it would be started, and have no part"
