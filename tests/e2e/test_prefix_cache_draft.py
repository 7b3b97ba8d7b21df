"""Cached prefixes on which the draft model never ran: the draft's KV is computed before it is used.

Without that, output would still be correct, but hardly any drafted token would be accepted.
"""

import pytest
from engine_probes import forget_prefixes
from engine_process import run

GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
OFF = {"extra_args": {"gsd": False}}
BLOCK = 32


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(6, 140, 260, seed=21)


@pytest.fixture(scope="module")
def plain(start_engine):
    return start_engine(None, block_size=BLOCK)


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine({}, block_size=BLOCK)


@pytest.fixture
def gsd(engine):
    """The engine with a cold cache."""
    engine.call(forget_prefixes)
    return engine


@pytest.fixture(scope="module")
def cold(engine, plain, prompts):
    """The counts for the prompts with an empty cache."""
    engine.call(forget_prefixes)
    return counters_of(engine, plain, prompts)


def counters_of(gsd, plain, prompts, params=GREEDY):
    """Serve the prompts, check that the tokens equal plain vLLM's, and return the changes of the counters."""
    before = gsd.metrics()
    answers = gsd.generate(prompts, params)
    after = gsd.metrics()
    assert [answer.tokens for answer in answers] == run(plain, prompts, params)
    counts = {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, (int, float))}
    return {**counts, "cached": sum(answer.num_cached_tokens for answer in answers)}


def speculates_as(counts, cold):
    """Whether graphs are as good as with an empty cache. Rounding may change the counts a little."""
    names = ("gsd_target_steps", "spec_decode_num_accepted_tokens")
    return all(counts[name] == pytest.approx(cold[name], rel=0.03) for name in names)


def test_the_draft_guesses_well_on_these_prompts(cold, prompts):
    """Otherwise the tests below would show nothing."""
    assert cold["cached"] == 0
    assert cold["spec_decode_num_accepted_tokens"] > 0.6 * cold["gsd_target_steps"]


def test_prefix_served_without_speculation(gsd, plain, prompts, cold):
    first = counters_of(gsd, plain, prompts, {**GREEDY, **OFF, "max_tokens": 4})
    assert first["gsd_draft_rows"] == 0
    counts = counters_of(gsd, plain, prompts)
    assert counts["cached"] > sum(map(len, prompts)) - BLOCK * len(prompts)
    assert speculates_as(counts, cold)
    assert counts["gsd_draft_rows"] == pytest.approx(cold["gsd_draft_rows"], rel=0.03)  # the draft reads whole prompts


def test_prefix_served_with_speculation_is_not_run_again(gsd, plain, prompts, cold):
    counters_of(gsd, plain, prompts)
    counts = counters_of(gsd, plain, prompts)
    assert speculates_as(counts, cold)
    saved = cold["gsd_draft_rows"] - counts["gsd_draft_rows"]
    assert saved == pytest.approx(counts["cached"], abs=0.05 * cold["gsd_draft_rows"])


def test_generated_text_as_a_prefix(gsd, plain, prompts):
    """The second turn of a chat whose first turn ran without speculation."""
    texts = run(gsd, prompts, {**GREEDY, **OFF})
    turns = [prompt + text + [7, 8, 9] for prompt, text in zip(prompts, texts, strict=True)]
    warm = counters_of(gsd, plain, turns)
    assert warm["cached"] > sum(map(len, turns)) - 2 * BLOCK * len(turns)
    gsd.call(forget_prefixes)
    assert speculates_as(warm, counters_of(gsd, plain, turns))


def test_beginning_with_and_middle_without(gsd, plain, prompts, cold):
    """Only the first blocks have draft KV."""
    counters_of(gsd, plain, [prompt[:70] for prompt in prompts], {**GREEDY, "max_tokens": 3})
    counters_of(gsd, plain, prompts, {**GREEDY, **OFF, "max_tokens": 4})
    counts = counters_of(gsd, plain, prompts)
    assert speculates_as(counts, cold)
    saved = cold["gsd_draft_rows"] - counts["gsd_draft_rows"]
    assert saved == pytest.approx(64 * len(prompts), abs=0.05 * cold["gsd_draft_rows"])


def test_both_kinds_at_once_over_one_prefix(gsd, plain, prompts, cold):
    """Requests with and without speculation run at the same time and share blocks."""
    params = [{**GREEDY, **OFF}] * len(prompts) + [GREEDY] * len(prompts)
    counters_of(gsd, plain, prompts, {**GREEDY, **OFF, "max_tokens": 4})
    counts = counters_of(gsd, plain, [*prompts, *prompts], params)
    unspeculated = GREEDY["max_tokens"] * len(prompts)
    assert speculates_as({**counts, "gsd_target_steps": counts["gsd_target_steps"] - unspeculated}, cold)
