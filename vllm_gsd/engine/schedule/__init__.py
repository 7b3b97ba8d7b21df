"""The scheduler's part: grammars, and requests that are served without a graph."""
