"""A plugin of vLLM for ranks in tests. It lets them sleep until a message arrives.

By default they poll for a second first, which keeps a processor from all others.
"""


def register() -> None:
    """vLLM calls this before a rank listens to its first message."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0,)
