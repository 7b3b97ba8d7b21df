"""What ``vllm-gsd check`` finds out: whether this installation and this pair of models can serve gsd, in seconds.

Models are known by their small files and the headers of their weights. Whatever imports torch or vLLM runs in a process
of its own (``probes``), so that a broken installation is a finding and not the end of the check.
"""
