"""Distils a draft model from any Llama-like target: ``vllm-gsd distill``.

The stages, each a module, each resumable, each leaving its result in the work folder:

1. ``prompts``: varied requests from templates, or from a file.
2. ``generate``: the target answers them with vLLM in big batches; kept with its top-k probabilities.
3. ``student``: a small model made of the target's own layers, or narrowed from them, with a trimmed vocabulary.
4. ``train``: the student learns the target's probabilities.
5. ``validate``: agreement with the target on text kept back, then tokens per step and speed in the real engine.
6. ``card``: the Hugging Face folder's model card.
"""
