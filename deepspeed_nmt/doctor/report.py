"""Findings as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed_nmt.doctor.examination import TOGETHER, Result
from deepspeed_nmt.errors import counted

_SHOWN_HOSTS = 8


def text_of(result: Result) -> Iterator[str]:
    """Yield the lines of a result: those of all hosts first, and equal ones of several hosts once."""
    widths = [max((len(line[index]) for line in result.lines), default=0) for index in (2, 1)]
    for hosts, lines in _groups(result).items():
        names = ", ".join(hosts[:_SHOWN_HOSTS])
        yield names + (f" and {len(hosts) - _SHOWN_HOSTS} more" if len(hosts) > _SHOWN_HOSTS else "")
        for check, level, text in lines:
            yield f"  {level:<{widths[0]}}  {check:<{widths[1]}}  {text}"
    yield summary(result)


def summary(result: Result) -> str:
    """Return the numbers of hosts, faults and warnings as text."""
    faults, warnings = (
        len({line[1:] for line in result.lines if line.level == level}) for level in ("fault", "warning")
    )
    return f"{counted(len(result.hosts), 'hosts')}, {counted(result.ranks, 'ranks')}: " + (
        f"{counted(faults, 'faults')}, {counted(warnings, 'warnings')}" if faults or warnings else "no fault"
    )


def json_of(result: Result) -> dict[str, Any]:
    """Return a result as an object for JSON."""
    findings = [
        {"level": level, "check": check, "hosts": [] if hosts == (TOGETHER,) else list(hosts), "text": text}
        for hosts, lines in _groups(result).items()
        for check, level, text in lines
    ]
    return {
        "hosts": result.hosts,
        "ranks": result.ranks,
        "faults": sum(each["level"] == "fault" for each in findings),
        "warnings": sum(each["level"] == "warning" for each in findings),
        "findings": findings,
    }


def _groups(result: Result) -> dict[tuple[str, ...], list[tuple[str, str, str]]]:
    """Return the lines by the hosts that have them: those of more hosts first, those about all hosts last."""
    hosts_of: dict[tuple[str, str, str], dict[str, None]] = {}
    for line in result.lines:
        hosts_of.setdefault(line[1:], {})[line.host] = None
    groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for found, hosts in hosts_of.items():
        groups.setdefault(tuple(sorted(hosts)), []).append(found)
    return dict(sorted(groups.items(), key=lambda item: (item[0] == (TOGETHER,), -len(item[0]), item[0])))
