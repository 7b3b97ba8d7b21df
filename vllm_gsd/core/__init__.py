"""The method: token graph, growth, merging, flattening, verification walk.

Nothing here knows vLLM. Graphs of a whole batch live in padded numpy arrays (``graph.GraphBatch``)
and every operation handles the whole batch. These modules specify the operations, and need numpy alone; ``host`` gives
those that the engine runs.
"""
