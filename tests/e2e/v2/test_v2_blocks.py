"""Drafts of whole blocks on V2: the chains of vLLM's own methods step by step, and plain V2's output."""

import pytest
from draft_records import record_drafts, recorded_drafts
from engine_process import run
from tiny_blocks import build_tiny_block
from v2_engine import V2Engine

GREEDY = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
SEEDED = [{**GREEDY, "temperature": 0.7 + 0.3 * i, "seed": i} for i in range(4)]
DEPTH = 3
CHAIN = {"sources": ["draft"], "top_k": 1, "max_depth": DEPTH, "num_speculative_tokens": DEPTH, "theta_prob": 0.0}
GRAPH = {**CHAIN, "top_k": 3, "num_speculative_tokens": 39, "theta_sib": 0.0}
ENGINE = {"max_num_batched_tokens": 512}
KINDS = {"dflash2": {}, "dflash": {}, "bonus anchor": {"trimmed": True, "sample_from_anchor": False}, "dspark": {}}


@pytest.fixture(scope="module")
def drafts(tiny_pair, tmp_path_factory):
    """Folders of drafts by kind. DFlash2's convolutions span as many rows as are drafted."""
    folder = tmp_path_factory.mktemp("blocks")
    kinds = {name: name if name in ("dspark", "dflash2", "dflash") else "dspark" for name in KINDS}
    return {name: build_tiny_block(kinds[name], tiny_pair.target, folder / name, **KINDS[name]) for name in KINDS}


@pytest.fixture(scope="module")
def four_prompts(random_prompts):
    return random_prompts(4, 5, 20, seed=3)


def drafted(engine, prompts):
    """Tokens of the first prompt alone, and what was drafted for it at each step."""
    engine.call(record_drafts)
    (tokens,) = run(engine, prompts[:1], {**GREEDY, "max_tokens": 16})
    return tokens, engine.call(recorded_drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_same_head_same_chain(tiny_pair, start_v2, engine_pool, drafts, four_prompts, kind):
    """With one candidate, vLLM's drafts and steps; with more, no more steps. The last drafts are shorter here."""
    method = "dspark" if kind == "bonus anchor" else kind.rstrip("2")
    own = {"method": method, "model": str(drafts[kind]), "num_speculative_tokens": DEPTH}
    upstream = engine_pool.engine(f"vLLM's {kind}", lambda: V2Engine(tiny_pair.target, own, **ENGINE))
    tokens, theirs = drafted(upstream, four_prompts)
    found, ours = drafted(start_v2({**CHAIN, "model": str(drafts[kind])}, **ENGINE), four_prompts)
    assert found == tokens
    assert len(ours) == len(theirs)
    assert ours[: -DEPTH - 1] == theirs[: -DEPTH - 1] and len(ours) > DEPTH + 1
    if kind == "dspark":  # the only one of these drafts that guesses well; the next test uses the same engine
        found, more = drafted(start_v2({**GRAPH, "model": str(drafts[kind])}, **ENGINE), four_prompts)
        assert found == tokens
        assert len(more) <= len(ours)


def test_equals_plain_v2(start_v2, drafts, four_prompts):
    plain, engine = start_v2(None, **ENGINE), start_v2({**GRAPH, "model": str(drafts["dspark"])}, **ENGINE)
    before = engine.metrics()
    for params in (GREEDY, SEEDED):
        assert run(engine, four_prompts, params) == run(plain, four_prompts, params)
    after = engine.metrics()
    forwards, steps = (after[name] - before[name] for name in ("gsd_draft_forwards", "gsd_target_steps"))
    assert 0 < forwards <= steps
