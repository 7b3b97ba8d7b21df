"""A vLLM plugin that makes ranks in tests sleep until a message arrives.

By default, ranks first poll for a second, which keeps a core busy.
"""

LONGEST_MS = 5


def register() -> None:
    """vLLM calls this before a rank listens to its first message."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0,)
    # vLLM drops the notification of a message that is sent right after another, and a reader that sleeps would notice
    # the message seconds later only.
    wait = SpinCondition.wait
    SpinCondition.wait = lambda self, timeout_ms=LONGEST_MS: wait(self, min(timeout_ms or LONGEST_MS, LONGEST_MS))
