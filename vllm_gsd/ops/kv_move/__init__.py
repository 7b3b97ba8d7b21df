"""Compaction: moving the KV of accepted nodes to contiguous slots."""
