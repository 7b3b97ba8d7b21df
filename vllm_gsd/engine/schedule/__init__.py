"""The scheduler, its grammars along graphs, and where texts end."""
