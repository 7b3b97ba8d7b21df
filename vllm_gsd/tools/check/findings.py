"""What a check finds, one line each."""

from __future__ import annotations

from typing import Literal, NamedTuple

# "failed": gsd will not work so. "unknown": it could not be found out, because of a failure above.
Status = Literal["ok", "note", "unknown", "failed"]


class Finding(NamedTuple):
    """One line of the table."""

    topic: str
    status: Status
    detail: str


def passed(findings: list[Finding]) -> bool:
    """Whether nothing stands in the way."""
    return all(finding.status != "failed" for finding in findings)
