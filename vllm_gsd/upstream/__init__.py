"""The only package that wraps, replaces or assigns symbols of vLLM and of the libraries it uses.

- The record: ``inventory`` and ``carried`` list every change as a ``patch``, with its reason, its contract test and the
  condition under which it can be removed. ``symbols`` checks that vLLM has what is changed, ``patching`` changes it.
- When vLLM loads the plugin: ``install`` applies ``hooks``, or else ``refusal`` rejects gsd.
- In an engine: ``wire`` has the keys and attributes under which our data travels on vLLM's objects. ``workers`` changes
  what workers build, ``drafts`` and ``weights`` models, ``structured`` grammars, ``ray_ranks`` Ray's executor, and
  ``instances`` single objects.
- In our tools: ``parts`` times the parts of a step, ``forwards`` observes forward passes.
"""
