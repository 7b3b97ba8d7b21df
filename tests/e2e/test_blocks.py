"""Drafts of whole blocks (DSpark, DFlash2, DFlash): plain vLLM's output, one draft forward a step, KV by slot."""

import pytest
from engine_probes import forget_prefixes
from engine_process import Engine, run
from tiny_blocks import build_tiny_block

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
# Prompts come in pieces, and are found in the prefix cache.
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}
# vLLM 0.32 cannot draw with seeds on a CPU where prompts come in pieces: these fit into one step.
SEEDED = [{**GREEDY, "temperature": 0.7 + 0.1 * i, "top_p": 0.9, "seed": i} for i in range(8)]
KINDS = {
    "dspark": ("dspark", {}),
    "trimmed dspark": ("dspark", {"trimmed": True, "sample_from_anchor": False, "speculators": True}),
    "dflash2": ("dflash2", {}),
    "dflash": ("dflash", {"speculators": True}),
}


@pytest.fixture(scope="module")
def drafts(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    return {
        name: str(build_tiny_block(k, tiny_pair.target, folder / name, **keys)) for name, (k, keys) in KINDS.items()
    }


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


@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_vllm(start_engine, drafts, prompts, expected, kind):
    engine = start_engine({"model": drafts[kind], "theta_sib": 0.0}, **ENGINE)
    tokens, counts = counted(engine, prompts)
    assert tokens == expected[0]
    if kind != "dflash":
        assert counts["nodes_accepted_native"] + counts["nodes_accepted_merged"] > 0
    assert run(engine, [prompt[:8] for prompt in prompts], SEEDED) == expected[1]
    tokens, counts = counted(engine, prompts[:1])
    assert tokens == expected[0][:1]
    assert 0 < counts["draft_forwards"] <= counts["target_steps"]  # whatever the depth


def test_cached_prefixes_have_draft_kv(start_engine, drafts, prompts, expected):
    engine = start_engine({"model": drafts["dspark"], "sources": ["draft"]}, **ENGINE)
    engine.call(forget_prefixes)
    tokens, cold = counted(engine, prompts)
    assert tokens == expected[0]
    assert cold["kv_rows_moved"] > 0 and cold["nodes_accepted_native"] > 40
    _, warm = counted(engine, prompts)
    engine.call(forget_prefixes)
    run(engine, prompts, {**GREEDY, "extra_args": {"gsd": False}, "max_tokens": 1})
    _, of_target = counted(engine, prompts)  # blocks that the target filled while nothing was drafted
    for other in (warm, of_target):
        assert other["nodes_accepted_native"] == pytest.approx(cold["nodes_accepted_native"], rel=0.03)


def test_preempted_requests(start_engine, drafts, prompts, expected):
    """Of the blocks there are too few for all requests."""
    scarce = {**ENGINE, "num_gpu_blocks_override": 18}
    engine = start_engine({"model": drafts["dspark"], "sources": ["draft"]}, **scarce)
    tokens, counts = counted(engine, prompts)
    assert tokens == expected[0]
    assert engine.metrics()["num_preemptions"] > 0
    assert counts["nodes_accepted_native"] > 40


def test_grammars(text_pair, random_prompts, tmp_path):
    """Some requests have structured output, so that a grammar chooses among the nodes of their lattices."""
    prompts = random_prompts(4, 10, 60, seed=6)
    grammar = {"temperature": 0, "max_tokens": 24, "structured_outputs": {"regex": "(19|20)[0-9]{2}-[01][0-9](abc){4}"}}
    params = [grammar if i % 2 else {**GREEDY, "max_tokens": 24} for i in range(4)]
    draft = build_tiny_block("dspark", text_pair.target, tmp_path / "draft")
    found = []
    for config in (None, {"method": "gsd", "model": str(draft), "top_k": 4, "budget": 16}):
        engine = Engine(text_pair.target, config, skip_tokenizer_init=False, max_model_len=128)
        found.append(([answer.tokens for answer in engine.generate(prompts, params)], engine.metrics()))
        engine.close()
    (expected, _), (tokens, counts) = found
    assert tokens == expected
    assert counts["gsd_draft_forwards"] > 0 and not any(name.startswith("gsd_fallbacks") for name in counts)
