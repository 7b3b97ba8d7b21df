"""Drafting: the draft model, its KV cache, and other sources of draft tokens."""
