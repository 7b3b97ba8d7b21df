"""``vllm-gsd bench`` compares the graph with plain vLLM and its drafters, in turns, in one run.

``methods`` lists what is compared. ``engine`` is the process that runs one engine, and ``parts`` its clock. ``turns``
lets the engines take turns. ``analyses`` repeats the paper's ablations. ``report`` and ``page`` present the results.
"""
