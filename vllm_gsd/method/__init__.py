"""Graph-structured speculative decoding (Gong et al. 2024) in plain Python.

This is the specification: the C++ of ``kernels/cpu/core`` and the device's operators are tested against it.
"""
