"""Tensor-parallel ranks and Ray."""
