"""The scheduler's part: grammars along graphs, and requests that are decoded without a graph."""
