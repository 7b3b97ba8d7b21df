"""Attention of tree rows over a paged KV cache."""
