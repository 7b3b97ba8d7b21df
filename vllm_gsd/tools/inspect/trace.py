"""Reads traces, the JSON lines that an engine writes for requests that ask for them (see ``docs/inspect.md``)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from vllm_gsd.tools.errors import ToolError

VERSION = 1
# What this package reads of a step's record.
STEP_KEYS = {"tokens", "graph", "pruned", "verified"}


class Trace(NamedTuple):
    """One request of a trace."""

    request: dict[str, Any]  # the record of its start
    steps: list[dict[str, Any]]  # the records of its steps, in order


def read_traces(path: Path) -> dict[str, Trace]:
    """The requests of a trace by id, in the order in which they began.

    An engine may be writing the file, so an unfinished last line is left out.

    Raises:
        ToolError: the file cannot be read, is no trace, or has another version.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ToolError(f'The trace "{path}" cannot be read ({error.strerror}).') from None
    traces: dict[str, Trace] = {}
    for number, line in enumerate(lines[:-1], start=1):
        record = _record(line, f'Line {number} of "{path}"')
        if record["event"] == "request":
            traces[record["request"]] = Trace(record, [])
        elif record["request"] in traces:  # an engine that found the file full may have left the first record out
            traces[record["request"]].steps.append(record)
    if not traces:
        raise ToolError(f'The trace "{path}" has no request; ask for one with "gsd_trace": true.')
    return traces


def choose(traces: dict[str, Trace], request: str | None, path: Path) -> Trace:
    """The trace of a request, given by its id or the beginning of it; the last one for None.

    Raises:
        ToolError: there is none, or several begin so.
    """
    found = [trace for name, trace in traces.items() if request is None or name.startswith(request)]
    if request in traces:
        return traces[request]
    if not found or (request is not None and len(found) > 1):
        raise ToolError(
            f'--request is "{request}", with which {len(found)} requests of "{path}" begin; they are '
            f"{', '.join(list(traces)[:20])}{', ...' if len(traces) > 20 else ''}."
        )
    return found[-1]


def depths(verified: dict[str, list]) -> list[int]:
    """The depth of each verified row of a step's record; children of the root have 1."""
    found: list[int] = []
    for parent in verified["parent"]:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def _record(line: bytes, name: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    event = record.get("event") if isinstance(record, dict) else None
    known = event == "request" or (event == "step" and record.keys() >= STEP_KEYS)
    if not known or not isinstance(record.get("request"), str):
        raise ToolError(f'{name} is not a record of a trace; give the file that gsd.json names as "trace".')
    if record["event"] == "request" and record.get("version") != VERSION:
        raise ToolError(f"{name} has version {record.get('version')} of the format, but this command reads {VERSION}.")
    return record
