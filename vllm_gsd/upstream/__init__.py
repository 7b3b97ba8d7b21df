"""The only package that wraps, replaces or assigns symbols of vLLM and of the libraries it uses.

``inventory`` lists every change with its reason, its contract test and the condition under which it can be removed.
``wire`` defines the keys and attributes under which our data travels on vLLM's objects.
"""
