"""Triton kernels. Importing a module of this package needs Triton; the entries in ``vllm_gsd.ops`` do it when called.

They are Python and must be there in an installed package, so they live here and ``kernels/triton`` links to them.
"""
