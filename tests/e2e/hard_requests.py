"""Requests whose output no draft may change: greedy, seeded, with grammars, preempted, and with cached prefixes."""

GRAMMAR = {"structured_outputs": {"regex": "(19|20)[0-9]{2}-[01][0-9](abc){4}"}}
SCARCE = {"block_size": 32, "num_gpu_blocks_override": 11, "max_model_len": 128}  # too few blocks for eight requests


def hard_prompts(random_prompts) -> list[list[int]]:
    """Eight prompts, two of which the EAGLE-3 heads of ``tiny_eagle3`` have been fitted to."""
    return [*random_prompts(4, 5, 20, seed=3)[:2], *random_prompts(6, 20, 50, seed=6)]


def ask(engine, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Tokens for all prompts at once, then for the longest one alone, greedy and seeded, when its prefix is cached."""
    greedy = {"temperature": 0, "max_tokens": length, "ignore_eos": True}
    seeded = {**greedy, "temperature": 0.8, "top_p": 0.9}
    grammar = {"temperature": 0, "max_tokens": length, **GRAMMAR}
    params = [grammar if i % 4 == 1 else {**seeded, "seed": i} if i % 4 == 2 else greedy for i in range(len(prompts))]
    answers = engine.generate(prompts, params)
    for own in (greedy, {**seeded, "seed": 9}):
        answers += engine.generate([max(prompts, key=len)], own)
    assert answers[-1].num_cached_tokens > 0
    return [answer.tokens for answer in answers]


def check_counts(counts: dict, levels: bool) -> None:
    """Check the counters of an engine after ``ask``.

    Requests were preempted, nodes were verified, and no request fell back to plain decoding. Block drafts (without
    ``levels``) took at most one draft forward per step.
    """
    assert counts["num_preemptions"] > 0
    assert counts["gsd_nodes_verified"] > 0
    assert levels or counts["gsd_draft_forwards"] <= counts["gsd_target_steps"]
    assert not any(name.startswith("gsd_fallbacks") for name in counts)
