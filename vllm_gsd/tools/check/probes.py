"""What a check finds, and the start of the probes that need torch or vLLM, each in its own process.

An import that fails, crashes or hangs therefore becomes a finding.
"""

import json
import os
import subprocess
import sys
from typing import Any, Literal, NamedTuple

MARK = "vllm-gsd check: "  # marks the line with the answer among other output


class Finding(NamedTuple):
    """One line of the report."""

    topic: str
    # "failed": gsd cannot work. "unknown": an earlier failure prevented the check.
    status: Literal["ok", "note", "unknown", "failed"]
    detail: str


def ask(topic: str, question: dict[str, Any], timeout: float) -> list[Finding]:
    """Findings of a probe; ``topic`` is a key of ``probe.PROBES``."""
    command = [sys.executable, "-m", f"{__package__}.probe", topic, json.dumps(question)]
    # The command may run in a folder with other modules of these names, such as a clone of vLLM.
    safe = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, env=safe)
    except subprocess.TimeoutExpired:
        return [Finding(topic, "failed", f"no answer within {timeout:g} seconds; try --timeout {2 * timeout:g}")]
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return [Finding(*one) for one in json.loads(line.removeprefix(MARK))]
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return [
        Finding(topic, "failed", f"it ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    ]
