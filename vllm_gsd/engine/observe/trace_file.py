"""The file that traces are written to: JSON lines, bounded, readable by its owner only."""

import json
import os
from typing import Any

from vllm.logger import init_logger

from vllm_gsd.config import GSDConfigError

logger = init_logger("vllm.gsd")

# A file never grows above this size. A step of a request takes 2 to 10 kB.
MOST_BYTES = 64 << 20


class TraceFile:
    """Appends records to a file until it is full. Several engines may write to one file.

    The file is created with mode 600, because it holds the text of requests.

    Raises:
        GSDConfigError: the file cannot be written.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise GSDConfigError(f'"trace" is "{path}", but that file cannot be written ({error.strerror}).') from None
        self.full = False

    def append(self, record: dict[str, Any]) -> None:
        """Write one record as a line. A record that would exceed ``MOST_BYTES`` ends the file, with one warning."""
        if self.full:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            size = os.fstat(self.file).st_size
            self.full, reason = size + len(line) > MOST_BYTES, f"it has reached {MOST_BYTES >> 20} MiB"
            # One call, so that engines do not mix their lines. A disk that is nearly full takes a part of a line.
            if not self.full and os.write(self.file, line) < len(line):
                self.full, reason = True, "the disk is full"
                os.ftruncate(self.file, size)
        except OSError as error:  # a full disk must not end the engine
            self.full, reason = True, str(error.strerror)
        if self.full:
            logger.warning("gsd: nothing more is written to the trace %s, because %s.", self.path, reason)
