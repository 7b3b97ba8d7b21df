"""What lives inside vLLM's processes: attention, proposer, verification, KV bookkeeping."""
