"""Block drafts (DSpark, DFlash2, DFlash): output equals plain vLLM's, and a step takes one draft forward."""

import pytest
from engine_probes import forget_prefixes
from engine_process import Engine, draft_every_level, run
from rounding import assert_close, generates
from tiny_blocks import BLOCKS, DEPTH, greedy_texts

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
# Long prompts are read in chunks, and their prefixes are cached.
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}
# On CPUs, vLLM 0.32 cannot sample with seeds if a prompt is chunked. Seeded prompts are cut to fit into one step.
SEEDED = [{**GREEDY, "temperature": 0.7 + 0.1 * i, "top_p": 0.9, "seed": i} for i in range(8)]
# CHAIN drafts only the best candidate at each depth. GRAPH has every path of two candidates per depth.
CHAIN = {"sources": ["draft"], "top_k": 1, "max_depth": DEPTH, "num_speculative_tokens": DEPTH, "budget": DEPTH}
CHAIN |= {"theta_prob": 0.0, "theta_sib": 0.0, "merge_ngram": 0}
GRAPH = {**CHAIN, "top_k": 2, "num_speculative_tokens": 14, "budget": 14}


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(8, 5, 150, seed=31)


@pytest.fixture(scope="module")
def expected(plain, prompts):
    return run(plain, prompts, GREEDY), run(plain, [prompt[:8] for prompt in prompts], SEEDED)


def counted(engine, prompts, params=GREEDY):
    names = ("target_steps", "draft_forwards", "nodes_accepted_native", "nodes_accepted_merged", "kv_rows_moved")
    before = engine.metrics()
    tokens = run(engine, prompts, params)
    after = engine.metrics()
    return tokens, {name: int(after[f"gsd_{name}"] - before[f"gsd_{name}"]) for name in names}


@pytest.mark.parametrize("kind", BLOCKS)
def test_equals_plain_vllm(start_engine, tiny_blocks, prompts, expected, kind):
    engine = start_engine({"model": str(tiny_blocks[kind]), "theta_sib": 0.0}, **ENGINE)
    tokens, counts = counted(engine, prompts)
    assert tokens == expected[0]
    if not kind.startswith("dflash "):
        assert counts["nodes_accepted_native"] + counts["nodes_accepted_merged"] > 0
    assert run(engine, [prompt[:8] for prompt in prompts], SEEDED) == expected[1]
    tokens, counts = counted(engine, prompts[:1])
    assert tokens == expected[0][:1]
    assert 0 < counts["draft_forwards"] <= counts["target_steps"]  # at any depth


def test_cached_prefixes_have_draft_kv(start_engine, tiny_blocks, prompts, expected):
    # Every node of GRAPH is verified, so what the engine learns in the first run cannot change the next.
    engine = start_engine({"model": str(tiny_blocks["dspark"]), **GRAPH}, **ENGINE)
    engine.call(forget_prefixes)
    tokens, cold = counted(engine, prompts)
    assert tokens == expected[0]
    assert cold["kv_rows_moved"] > 0 and cold["nodes_accepted_native"] > 40
    _, warm = counted(engine, prompts)
    engine.call(forget_prefixes)
    run(engine, prompts, {**GREEDY, "extra_args": {"gsd": False}, "max_tokens": 1})
    _, of_target = counted(engine, prompts)  # the prefix cache has blocks that only the target filled
    for other in (warm, of_target):
        assert other["nodes_accepted_native"] == pytest.approx(cold["nodes_accepted_native"], rel=0.03)


def test_more_candidates_accept_no_less(start_engine, tiny_blocks, prompts):
    """Without pruning, the graph contains the chain. ``v2/test_v2_drafts.py`` checks this for all kinds."""
    steps = []
    for config in (CHAIN, GRAPH):
        engine = start_engine({"model": str(tiny_blocks["dspark"]), **config}, **ENGINE)
        steps.append([counted(engine, [prompt])[1]["target_steps"] for prompt in prompts[:4]])
    assert all(graph <= chain for chain, graph in zip(*steps, strict=True))


def test_shallow_graphs_do_not_shorten_blocks(start_engine, tiny_blocks, prompts, expected):
    shallow = {**GRAPH, "max_depth": 1}
    engine = start_engine({"model": str(tiny_blocks["dspark"]), **shallow}, **ENGINE)
    before = engine.metrics()
    assert run(engine, prompts[:2], GREEDY) == expected[0][:2]
    after = engine.metrics()
    rows, drafts = (after[name] - before[name] for name in ("gsd_draft_rows", "spec_decode_num_drafts"))
    assert rows >= DEPTH * drafts > 0


def test_a_large_vocabulary_in_bfloat16(wide_block):
    """With packed weights, candidates are chosen among all 40,000 tokens after the bias is added."""
    target, draft = wide_block
    prompts = [text[:6].tolist() for text in greedy_texts(target, 40_000)[:8]]
    options = {**ENGINE, "dtype": "bfloat16", "skip_tokenizer_init": True}
    engine = Engine(target, {"method": "gsd", "model": str(draft), **GRAPH}, [draft_every_level], **options)
    _, counts = counted(engine, prompts)
    # If candidates were chosen among the 256 best tokens before the bias, only one node would be accepted.
    assert counts["nodes_accepted_native"] + counts["nodes_accepted_merged"] > 20
    params = {**GREEDY, "logprobs": 2}
    theirs = engine.generate(prompts, {**params, "extra_args": {"gsd": False}})
    assert_close(theirs, prompts, generates(engine, params))
    engine.close()
