"""``vllm-gsd distill`` distils a draft model from any Llama-like target.

Each stage is a module, writes its result to the work folder and can be resumed:

1. ``prompts`` draws varied requests from templates or reads them from a file.
2. ``generate`` lets the target answer them with vLLM in large batches, and keeps its top-k probabilities.
3. ``student`` and ``eagle`` make the small model: from the target's layers, narrower ones, or in EAGLE's format.
4. ``train`` trains the student on the target's probabilities.
5. ``validate`` measures agreement with the target on held-out text, and ``engine`` the gain in the real engine.
6. ``card`` writes the model card.
"""
