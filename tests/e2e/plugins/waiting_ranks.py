"""A vLLM plugin that makes ranks in tests sleep until a message arrives.

By default, ranks first poll for a second, which keeps a core busy.
"""


def register() -> None:
    """vLLM calls this before a rank listens to its first message."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0,)
