"""Reports checks and measured links, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from rich.markup import escape
from rich.table import Table

from worldsize.core import Link


@dataclass(frozen=True)
class Check:
    """One check of one host; ``remedy``: what to do if it is not ``ok``."""

    check: str
    host: str
    ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Pair:
    """The measured link from one host to another, shared by their ranks."""

    source: str
    target: str
    link: Link


@dataclass(frozen=True)
class Report:
    """Checks of a cluster, and its measured links by tier and from host to host."""

    checks: Sequence[Check]
    links: Mapping[str, Link] = field(default_factory=dict)
    pairs: Sequence[Pair] = ()
    hosts: Sequence[Mapping[str, Any]] = ()

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON of schema 1; bandwidths in bytes per second, latencies in seconds."""
        return {
            "schema": 1,
            "checks": [asdict(check) for check in self.checks],
            "links": {tier: asdict(link) for tier, link in self.links.items()},
            "pairs": [{"from": each.source, "to": each.target, **asdict(each.link)} for each in self.pairs],
            "hosts": list(self.hosts),
        }

    def table(self) -> Table:
        """Build a table: a line for each check that all hosts pass, and one for each host that fails."""
        table = Table("", "check", "host", "found", title="worldsize doctor", title_justify="left")
        table.columns[3].overflow = "fold"
        for name, group in groupby(self.checks, key=lambda check: check.check):
            checks = list(group)
            good = [check for check in checks if check.ok]
            for detail in dict.fromkeys(check.detail for check in good):
                hosts = [check.host for check in good if check.detail == detail]
                table.add_row("[green]✓[/]", name, _listed(hosts), escape(detail))
            for bad in (check for check in checks if not check.ok):
                text = f"{bad.detail}\n→ {bad.remedy}" if bad.remedy else bad.detail
                table.add_row("[red]✗[/]", f"[red]{name}[/]", escape(bad.host), escape(text))
        return table


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{hosts[0]}, {hosts[1]} .. {hosts[-1]} ({len(hosts)})"


def rate(bandwidth: float) -> str:
    """Format bytes a second as people say it."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if bandwidth >= factor:
            return f"{bandwidth / factor:.3g} {unit}"
    return f"{bandwidth / 1e3:.3g} kB/s"
