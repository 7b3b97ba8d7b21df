"""Rows of hidden states by KV slot."""
