"""Attention along token graphs over a paged KV cache."""
