"""Verification: lay flattened graphs out over the target's rows, then move the KV of accepted nodes."""
