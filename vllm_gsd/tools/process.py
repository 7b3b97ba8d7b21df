"""A process that ends with the one that started it."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_parent() -> None:
    """Kill this process when the one that started it ends, even if that is killed and can end nothing itself."""
    getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(PR_SET_PDEATHSIG, signal.SIGKILL)  # other systems lack it
