"""Report of checks and measured links, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from rich.markup import escape
from rich.table import Table

from worldsize.core import Link
from worldsize.messages import printable
from worldsize.record.manifest import check_against_schema as check_schema
from worldsize.strict_json import parse_strict_json, sanitize_json


@dataclass(frozen=True)
class Check:
    """Result of one check on one host; ``remedy``: what to do about a failure or a warning."""

    check: str
    host: str
    ok: bool
    detail: str
    remedy: str = ""

    @property
    def mark(self) -> str:
        """Colored symbol for the outcome, in rich markup."""
        if not self.ok:
            return "[red]✗[/]"
        return "[yellow]![/]" if self.remedy else "[green]✓[/]"


@dataclass(frozen=True)
class Pair:
    """The measured link between two hosts in one direction, shared by their ranks."""

    source: str
    target: str
    link: Link


_MARK = "worldsize doctor found: "  # precedes a report in a log, after the pod or node name that some launchers prepend

_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_LINK = {"type": "object", "additionalProperties": _NUMBER}
_CHECK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": _TEXT}
_PAIR = {"type": "object", "properties": {"from": _TEXT, "to": _TEXT}, "additionalProperties": _NUMBER}
_SHAPE = {
    "type": "object",
    "properties": {
        "checks": {"type": "array", "items": _CHECK},
        "links": {"type": "object", "additionalProperties": _LINK},
        "pairs": {"type": "array", "items": _PAIR},
        "hosts": {"type": "array", "items": {"type": "object"}},
    },
}


@dataclass(frozen=True)
class Report:
    """Checks of a cluster, and its measured links by tier and from host to host."""

    checks: Sequence[Check]
    links: Mapping[str, Link] = field(default_factory=dict)
    pairs: Sequence[Pair] = ()
    hosts: Sequence[Mapping[str, Any]] = ()

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, schema 1, in bytes per second and seconds."""
        return {
            "schema": 1,
            "checks": [asdict(check) for check in self.checks],
            "links": {tier: asdict(link) for tier, link in self.links.items()},
            "pairs": [{"from": each.source, "to": each.target, **asdict(each.link)} for each in self.pairs],
            "hosts": list(self.hosts),
        }

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Report:
        """Create a report from the result of :meth:`to_json`.

        Raises:
            ValueError: the format is different.
        """
        try:
            check_schema(facts, _SHAPE)
            links = {tier: Link(**each) for tier, each in facts["links"].items()}
            pairs = [
                Pair(each["from"], each["to"], Link(each["bandwidth"], each["latency"], each["gap"], each["incast"]))
                for each in facts["pairs"]
            ]
            return Report([Check(**each) for each in facts["checks"]], links, pairs, list(facts["hosts"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a worldsize doctor report: {error!r}") from error

    def format_log_line(self) -> str:
        """Return the report as a log line, for :func:`report_in`."""
        return _MARK + json.dumps(sanitize_json(self.to_json()))

    def build_table(self) -> Table:
        """Build a table with one row per check that all hosts pass, and one per failing host."""
        table = Table("", "check", "host", "found", title="worldsize doctor", title_justify="left")
        table.columns[3].overflow = "fold"
        for name, group in groupby(self.checks, key=lambda check: check.check):
            checks = list(group)
            good = [check for check in checks if check.ok and not check.remedy]
            for detail in dict.fromkeys(check.detail for check in good):
                hosts = [check.host for check in good if check.detail == detail]
                table.add_row(
                    "[green]✓[/]", _escape_text(name), _escape_text(_format_hosts(hosts)), _escape_text(detail)
                )
            for other in (check for check in checks if check not in good):
                text = _escape_text(other.detail) + (f"\n→ {_escape_text(other.remedy)}" if other.remedy else "")
                style = "yellow" if other.ok else "red"
                table.add_row(other.mark, f"[{style}]{_escape_text(name)}[/]", _escape_text(other.host), text)
        return table


def report_in(log: str) -> Report | None:
    """Return the last report in an untrusted log, or None."""
    for line in reversed(log.splitlines()):
        _, mark, text = line.partition(_MARK)
        if mark:
            try:
                return Report.from_json(parse_strict_json(text))
            except ValueError:  # truncated, or from a different version
                continue
    return None


def _escape_text(text: str) -> str:
    """Escape untrusted text from a host for rich and the terminal."""
    return escape(printable(text))


def _format_hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{hosts[0]}, {hosts[1]} .. {hosts[-1]} ({len(hosts)})"


def format_rate(bandwidth: float) -> str:
    """Format bytes per second in readable units."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if bandwidth >= factor:
            return f"{bandwidth / factor:.3g} {unit}"
    return f"{bandwidth / 1e3:.3g} kB/s"
