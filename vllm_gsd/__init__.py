"""vllm_gsd: graph-structured speculative decoding for vLLM.

vLLM finds ``register`` through the entry point group ``vllm.general_plugins`` and calls it in every process.
"""

_registered = False


def register() -> None:
    """Teach vLLM ``"method": "gsd"``; with any other (or no) speculative config nothing changes.

    Idempotent. Raises RuntimeError when the installed vLLM lacks a symbol this plugin builds on.
    """
    global _registered
    if _registered:
        return
    from vllm_gsd.upstream.hooks import install

    install()
    _registered = True
