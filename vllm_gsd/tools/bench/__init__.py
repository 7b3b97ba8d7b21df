"""``vllm-gsd bench``: the graph against plain vLLM and its other drafters, in turns, in one run.

``methods`` says what is compared, ``engine`` is the process that runs one engine, ``parts`` its clock, ``turns`` lets
the engines take turns, ``analyses`` makes the paper's ablations, ``report`` and ``plots`` show what came out.
"""
