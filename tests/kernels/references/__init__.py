"""Plain PyTorch and Python versions of the operators that only Triton kernels serve."""
