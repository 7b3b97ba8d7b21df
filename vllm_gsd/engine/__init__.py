"""The parts that run inside vLLM, from a batch of requests to a verified token graph."""
