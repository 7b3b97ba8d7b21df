"""Verification: laying a flattened graph out over the target's rows, and putting the KV cache in order afterwards."""
