"""The method: token graph, growth, merging, flattening, verification walk.

Nothing here knows vLLM. Graphs of a whole batch live in padded numpy arrays (``graph.GraphBatch``)
and every operation handles the batch in one compiled call, so a step costs O(nodes), not Python time.
"""
