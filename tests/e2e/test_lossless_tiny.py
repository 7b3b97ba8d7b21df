"""In float32 on a tiny pair, output with graphs equals plain vLLM's token for token."""

import pytest
from engine_probes import attention_groups, block_size, choose_the_block_size_late, split_attention_groups
from engine_process import Engine, draft_every_level, model_runner, run

SAMPLING = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 0},
]
# Keys of gsd.json besides method and model.
CONFIGS = {
    "default": {},
    "no-merging": {"merge_ngram": 0},
    "one-node": {"num_speculative_tokens": 1},
    "five-nodes": {"num_speculative_tokens": 5, "merge_ngram": 1},
    "two-mask-words": {"num_speculative_tokens": 70, "max_depth": 8, "theta_prob": 0.0, "theta_sib": 0.0},
    "chain": {"sources": ["draft"], "top_k": 1},
    "ngram-only": {"model": None},
    "both-sources": {"sources": ["draft", "ngram"]},
    "paper": {"preset": "paper"},
    "budget": {"budget": 4},
    "trimmed-draft": {"draft_vocab_size": 200},
}


def greedy(max_tokens=40):
    return {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


def seeded(count, max_tokens=40):
    return [
        {**SAMPLING[i % len(SAMPLING)], "seed": 100 + i, "max_tokens": max_tokens, "ignore_eos": True}
        for i in range(count)
    ]


def mixed(count):
    """Greedy and sampled requests of different lengths, with and without EOS; some opt out of speculation."""
    params = []
    for i, keys in enumerate(seeded(count)):
        keys = {**keys, "max_tokens": 1 + 5 * i % 48, "ignore_eos": i % 3 > 0}
        params.append({**keys, "extra_args": {"gsd": False}} if i % 5 == 4 else keys)
    return params


@pytest.fixture(scope="module")
def workloads(random_prompts):
    """By name: (batches of prompts, sampling parameters)."""
    prompts = random_prompts(32)
    return {
        "greedy-1": ([[prompt] for prompt in prompts[:2]], greedy()),
        "greedy-8": ([prompts[:8]], greedy()),
        "greedy-32": ([prompts], greedy()),
        "seeded-1": ([[prompts[1]]], seeded(2)[1:]),
        "seeded-8": ([prompts[:8]], seeded(8)),
        "seeded-32": ([prompts], seeded(32)),
        "mixed-32": ([prompts], mixed(32)),
    }


@pytest.fixture(scope="module")
def plain(start_engine, workloads):
    """Plain vLLM's tokens by workload."""
    engine = start_engine(None)
    return {name: [run(engine, batch, params) for batch in batches] for name, (batches, params) in workloads.items()}


@pytest.fixture(params=CONFIGS, scope="module")
def config(request):
    return request.param


@pytest.mark.parametrize(
    "workload", ["greedy-1", "greedy-8", "greedy-32", "seeded-1", "seeded-8", "seeded-32", "mixed-32"]
)
def test_equals_plain_vllm(start_engine, workloads, plain, config, workload):
    engine = start_engine(CONFIGS[config])
    batches, params = workloads[workload]
    assert [run(engine, batch, params) for batch in batches] == plain[workload]


def mask_float32(llm):
    """Make our kernel also attend chains, rows without a graph, and prompts, as it does in bfloat16."""
    runner = model_runner(llm)
    runner.masks_chains = runner.speculation.drafter.masks_chains = True


@pytest.mark.parametrize("workload", ["greedy-1", "seeded-8", "mixed-32"])
@pytest.mark.parametrize("config", ["default", "chain", "budget"], indirect=True)
def test_equals_plain_vllm_when_all_rows_are_masked(start_engine, workloads, plain, config, workload):
    engine = start_engine(CONFIGS[config], setup=(mask_float32,))
    batches, params = workloads[workload]
    assert [run(engine, batch, params) for batch in batches] == plain[workload]


def test_equals_plain_vllm_when_the_block_size_is_chosen_late(tiny_pair, workloads, plain):
    config, before = {"method": "gsd", "model": str(tiny_pair.draft)}, [choose_the_block_size_late]
    engine = Engine(tiny_pair.target, config, [draft_every_level], before, skip_tokenizer_init=True)
    batches, params = workloads["greedy-8"]
    answers, size = [run(engine, batch, params) for batch in batches], engine.call(block_size)
    engine.close()
    assert size == 64 and answers == plain["greedy-8"]


def counters_of_a_run(start_engine, config, prompts, params):
    """By how much a run increased each counter, and the number of tokens it generated."""
    engine = start_engine(CONFIGS[config])
    before = engine.metrics()
    tokens = sum(map(len, run(engine, prompts, params)))
    after = engine.metrics()
    return {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, (int, float))}, tokens


class TestTheGraphIsUsed:
    """Equal output proves nothing without speculation, so these tests check what each config did."""

    def test_several_tokens_a_step(self, start_engine, random_prompts):
        counts, tokens = counters_of_a_run(start_engine, "default", random_prompts(32), greedy())
        per_step = tokens / counts["gsd_target_steps"]
        assert 1.3 < per_step < 7  # max_depth is 6
        assert counts["gsd_nodes_merged"] > 0
        assert counts["gsd_nodes_accepted_merged"] > 0
        assert counts["gsd_kv_rows_moved"] > 0
        assert counts["spec_decode_num_accepted_tokens"] == sum(
            counts[f"gsd_nodes_accepted_{origin}"] for origin in ("native", "merged", "ngram", "agreed", "grammar")
        )
        # Every step emits its accepted nodes and one more token, and max_tokens discards none of them.
        assert tokens == counts["gsd_target_steps"] + counts["spec_decode_num_accepted_tokens"]

    def test_sampled_text_gains_too(self, start_engine, random_prompts):
        counts, tokens = counters_of_a_run(start_engine, "default", random_prompts(32), seeded(32))
        assert tokens / counts["gsd_target_steps"] > 1.3

    def test_merging_off_merges_nothing(self, start_engine, random_prompts):
        counts, _ = counters_of_a_run(start_engine, "no-merging", random_prompts(8), greedy())
        assert counts["gsd_nodes_merged"] == 0
        assert counts["spec_decode_num_accepted_tokens"] > 0

    def test_wide_graphs_take_two_mask_words(self, start_engine, random_prompts):
        counts, tokens = counters_of_a_run(start_engine, "two-mask-words", random_prompts(8), greedy())
        # Graphs are smaller only near max_tokens.
        assert counts["gsd_nodes_verified"] / counts["spec_decode_num_drafts"] > 60
        assert tokens / counts["gsd_target_steps"] > 2

    def test_top_k_1_makes_chains(self, start_engine, random_prompts):
        counts, _ = counters_of_a_run(start_engine, "chain", random_prompts(8), greedy())
        assert counts["gsd_chain_requests"] == counts["spec_decode_num_drafts"] > 0
        assert counts["gsd_kv_rows_moved"] == 0
        assert counts["spec_decode_num_accepted_tokens"] > 0

    def test_budget_bounds_verified_nodes(self, start_engine, random_prompts):
        counts, _ = counters_of_a_run(start_engine, "budget", random_prompts(8), greedy())
        assert 0 < counts["gsd_nodes_verified"] <= 4 * counts["spec_decode_num_drafts"]

    def test_ngrams_without_a_draft_model(self, start_engine):
        prompts = [[7, 8, 9, 10, 11, 12] * 6, [20, 21] * 15, [30 + i % 3 for i in range(40)]]
        expected = run(start_engine(None), prompts, greedy(60))
        counts, tokens = counters_of_a_run(start_engine, "ngram-only", prompts, greedy(60))
        assert run(start_engine(CONFIGS["ngram-only"]), prompts, greedy(60)) == expected
        assert counts["gsd_nodes_accepted_ngram"] > 0
        assert counts["gsd_draft_forwards"] == 0
        assert tokens > counts["gsd_target_steps"]

    def test_both_sources_contribute(self, start_engine, random_prompts):
        counts, _ = counters_of_a_run(start_engine, "both-sources", random_prompts(32), greedy())
        assert counts["gsd_nodes_accepted_ngram"] > 0
        assert counts["gsd_nodes_accepted_native"] > 0

    @pytest.mark.parametrize(("config", "drafting"), [("default", 1), ("ngram-only", 0)])
    def test_whether_drafts_pay_is_told(self, start_engine, random_prompts, config, drafting):
        engine = start_engine(CONFIGS[config])
        run(engine, random_prompts(2), greedy(4))
        metrics = engine.metrics()
        assert metrics["gsd_drafting"] == drafting
        assert metrics["gsd_drafting_switches"] == 0

    def test_opt_out_verifies_nothing(self, start_engine, random_prompts):
        params = {**greedy(), "extra_args": {"gsd": False}}
        counts, tokens = counters_of_a_run(start_engine, "default", random_prompts(8), params)
        assert counts["spec_decode_num_drafts"] == 0
        assert counts["gsd_target_steps"] == tokens
        assert counts["gsd_fallbacks:opt_out"] == 8


@pytest.mark.parametrize("split", [False, True], ids=["by shape", "by layer"])
def test_layers_in_several_attention_groups(start_engine, unlike_pair, prompts, split):
    """The draft's heads differ in size from the target's, and layers may each have their own attention metadata."""
    config = {"model": str(unlike_pair.draft), "sources": ["draft"]}
    engine = start_engine(config, (split_attention_groups,) if split else ())
    assert [len(names) for names in engine.call(attention_groups)] == ([1] * 4 if split else [2, 2])
    for params in (greedy(), seeded(len(prompts))):
        assert run(engine, prompts, params) == run(start_engine(None), prompts, params)
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > metrics["gsd_target_steps"] / 5
    assert metrics["gsd_chain_requests"] < metrics["gsd_target_steps"] / 2
