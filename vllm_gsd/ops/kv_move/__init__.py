"""Moving the KV of accepted nodes to contiguous slots."""
