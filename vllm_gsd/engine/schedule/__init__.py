"""Grammars along graphs in the scheduler, which requests are decoded without a graph, and where texts end."""
