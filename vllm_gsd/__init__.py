"""vllm_gsd: graph-structured speculative decoding for vLLM.

vLLM finds ``register`` through the entry point group ``vllm.general_plugins`` and calls it in every process.
"""

_registered = False


def register() -> None:
    """Teach vLLM ``"method": "gsd"``; with any other (or no) speculative config nothing changes.

    Idempotent. Where the installed vLLM lacks a symbol that is wrapped, gsd is refused in one sentence and nothing
    else changes.
    """
    global _registered
    if _registered:
        return
    from vllm_gsd.upstream.install import install

    install()
    _registered = True
