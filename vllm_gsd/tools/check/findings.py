"""The findings of a check."""

from typing import Literal, NamedTuple

# "failed": gsd cannot work. "unknown": an earlier failure prevented the check.
Status = Literal["ok", "note", "unknown", "failed"]


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    status: Status
    detail: str


def passed(findings: list[Finding]) -> bool:
    """Whether no finding failed."""
    return all(finding.status != "failed" for finding in findings)
