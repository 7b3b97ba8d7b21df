"""vllm_gsd: graph-structured speculative decoding for vLLM.

vLLM finds ``register`` through the entry point group ``vllm.general_plugins`` and calls it in every process.
"""

_registered = False


def register() -> None:
    """Teach vLLM ``"method": "gsd"``; engines with any other speculative config, or none, are unaffected.

    The function is idempotent. If the installed vLLM lacks a symbol that the plugin wraps, requests for gsd are
    rejected with a clear message and nothing else changes.
    """
    global _registered
    if _registered:
        return
    from vllm_gsd.upstream.install import install

    install()
    _registered = True
