"""Tests of the draft phase with a toy draft: with Triton's interpreter only, and vLLM.

``tests/kernels/test_triton.py`` runs them in a process of their own, with the plugin ``preload_v2``.
"""

from vllm_gsd.ops.dispatch import interpreted

if not interpreted():
    collect_ignore_glob = ["test_*.py"]
