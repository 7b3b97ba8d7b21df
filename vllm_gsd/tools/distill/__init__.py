"""``vllm-gsd distill`` distils a draft model from any Llama-like target.

Each stage is a module, writes its result to the work folder and can be resumed:

1. ``prompts`` draws varied requests from templates or reads them from a file.
2. ``answers`` lets the target answer them (``generate``), which ``data`` reads. ``states`` gives the target's states
   over them, on a CPU as ``recorder`` kept them; ``packs`` makes batches of both.
3. ``speculators_students`` makes a DSpark block or an EAGLE-3 head, and ``lm`` a small language model (``students``).
4. ``train`` trains the student on the target's probabilities (``target``).
5. ``validate`` measures agreement with the target on held-out text, and ``engine`` the gain in the real engine.
6. ``card`` writes the model card.
"""
