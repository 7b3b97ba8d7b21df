"""Grammars along graphs in the scheduler, and which requests are decoded without a graph, and where texts end."""
