"""EAGLE and EAGLE-3 heads: output equals plain vLLM's, and graphs grow from the target's hidden states."""

import numpy as np
import pytest
import torch
from engine_probes import draft_pages, forget_prefixes, hidden_states_kept
from engine_process import model_runner, run
from tiny_eagle import chain_steps, load_exact

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
OFF = {"extra_args": {"gsd": False}}
# Long prompts are read in chunks, and their prefixes are cached.
ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32}
CONFIGS = {
    "graph": {},
    "chain": {"sources": ["draft"], "top_k": 1, "max_depth": 2, "num_speculative_tokens": 2},
    "trimmed": {"draft_vocab_size": 200, "max_depth": 4},
}
EAGLE3 = {"llama": {}, "qwen3": {"theta_prob": 0.0, "theta_sib": 0.0}, "midlayer": {"draft_vocab_size": 200}}


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(12, 5, 150, seed=31)


# On CPUs, vLLM 0.32 cannot sample with seeds if a prompt is chunked. Seeded prompts are cut to fit into one step.
SEEDED = [{**GREEDY, "temperature": 0.7 + 0.3 * i, "top_p": 0.9, "seed": i} for i in range(4)]


@pytest.fixture(scope="module")
def short(prompts):
    return [prompt[:16] for prompt in prompts[:4]]


@pytest.fixture(scope="module")
def expected(plain, prompts, short):
    return run(plain, prompts, GREEDY), run(plain, short, SEEDED)


@pytest.mark.parametrize("config", CONFIGS)
def test_equals_plain_vllm(start_engine, tiny_eagle, prompts, short, expected, config):
    equals_plain(start_engine({"model": str(tiny_eagle), **CONFIGS[config]}, **ENGINE), prompts, short, expected)


@pytest.mark.parametrize("head", EAGLE3)
def test_eagle3_equals_plain_vllm(start_engine, tiny_eagle3, prompts, short, expected, head):
    engine = start_engine({"model": str(tiny_eagle3 / head), **EAGLE3[head]}, **ENGINE)
    equals_plain(engine, prompts, short, expected)
    assert engine.metrics()["gsd_nodes_accepted_native"] > 50


def equals_plain(engine, prompts, short, expected):
    assert run(engine, prompts, GREEDY) == expected[0]
    assert run(engine, short, SEEDED) == expected[1]
    assert [run(engine, [prompt], GREEDY)[0] for prompt in prompts[:3]] == expected[0][:3]


def cache_bytes(llm) -> tuple[int, int]:
    """Bytes of the KV cache and of the stored hidden states."""
    runner = model_runner(llm)
    states = runner.speculation.features.states
    return sum(layer.size for layer in runner.kv_cache_config.kv_cache_tensors), states.nbytes


def test_hidden_states_are_part_of_the_memory_for_the_kv_cache(start_engine, tiny_eagle):
    limit = 1 << 26
    kv, features = start_engine({"model": str(tiny_eagle)}, kv_cache_memory_bytes=limit).call(cache_bytes)
    assert 0 < features < kv
    assert 0.99 * limit < kv + features < 1.001 * limit  # up to rounding by a block and a row


def accepted_by(engine, prompts, params=GREEDY):
    names = "gsd_target_steps", "spec_decode_num_accepted_tokens"
    before = engine.metrics()
    tokens = run(engine, prompts, params)
    after = engine.metrics()
    return tokens, tuple(int(after[name] - before[name]) for name in names)


def test_chains_are_those_of_the_student(start_engine, tiny_eagle, tiny_pair, prompts):
    """Steps and accepted drafts match those computed with the draft layer and the target in ``transformers``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    student = load_exact(tiny_eagle, model)
    engine = start_engine({"model": str(tiny_eagle), **CONFIGS["chain"]}, **ENGINE)
    engine.call(forget_prefixes)
    tokens, counts = accepted_by(engine, prompts)
    expected = [
        chain_steps(student, model, prompt + text, len(prompt), 2) for prompt, text in zip(prompts, tokens, strict=True)
    ]
    steps, accepted = (sum(column) for column in zip(*expected, strict=True))
    assert accepted > 20
    assert counts == pytest.approx((steps, accepted), rel=0.02)  # rounding may decide near ties differently


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_cached_prefixes_keep_their_hidden_states(start_engine, tiny_eagle, tiny_eagle3, prompts, kind):
    draft = tiny_eagle if kind == "eagle" else tiny_eagle3 / "llama"
    engine = start_engine({"model": str(draft), **CONFIGS["chain"]}, **ENGINE)
    engine.call(forget_prefixes)
    _, cold = accepted_by(engine, prompts)
    _, warm = accepted_by(engine, prompts)  # target and draft are cached
    engine.call(forget_prefixes)
    run(engine, prompts, {**GREEDY, **OFF, "max_tokens": 1})
    _, caught_up = accepted_by(engine, prompts)  # only the target is cached, and the draft catches up
    assert warm == pytest.approx(cold, rel=0.02)
    assert caught_up == pytest.approx(cold, rel=0.02)


def test_hidden_states_lie_where_plain_decoding_would_have_them(start_engine, tiny_eagle, tiny_pair, prompts):
    """After paths through graphs were accepted, the stored states equal those of ``transformers`` at every token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    engine = start_engine({"model": str(tiny_eagle)}, **ENGINE)
    engine.call(forget_prefixes)
    before = engine.metrics()["gsd_kv_rows_moved"]
    tokens, kept = engine.call(hidden_states_kept, prompts[0], GREEDY["max_tokens"])
    assert engine.metrics()["gsd_kv_rows_moved"] > before
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([prompts[0] + tokens]))[0][0]
    torch.testing.assert_close(torch.tensor(kept), states[: len(kept)], rtol=1e-3, atol=1e-3)
    assert len(kept) >= len(prompts[0]) + len(tokens) - 8


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_keys_and_values_of_prompts_need_no_forward_pass(start_engine, tiny_eagle, tiny_eagle3, prompts, kind):
    draft = tiny_eagle if kind == "eagle" else tiny_eagle3 / "llama"
    engine = start_engine({"model": str(draft), **CONFIGS["chain"]}, **ENGINE)
    prompt = max(prompts, key=len)
    (expected, rows), (pages, few) = (engine.call(draft_pages, prompt, whole) for whole in (True, False))
    assert rows > len(prompt) > 100 and few < 40
    assert len(pages) == 2 and np.abs(expected[0]).max() > 0.1
    for ours, theirs in zip(pages, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
