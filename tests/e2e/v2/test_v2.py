"""Graphs on Model Runner V2: texts equal plain V2's, and graphs equal V1's.

The tests are short, because every kernel is interpreted; ``scripts/check_v2`` runs longer ones. ``test_v2_features``
tests request features.
"""

from itertools import chain
from operator import methodcaller

import pytest
import torch
from engine_probes import attention_groups
from engine_process import run
from no_reads import guarded_calls, learn_a_step_late, refuse_reads, refused
from planted import draft_seconds, levels_seen, plant_costs, watch_levels
from request_tables import end_requests, tables

# Few levels keep steps short.
GSD = {"num_speculative_tokens": 8, "max_depth": 3}
GREEDY = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
SAMPLING = [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 20}, {"temperature": 1.3, "top_p": 0.5}, {"min_p": 0.1}]
SEEDED = [{**GREEDY, "temperature": 1.0, **keys, "seed": 7 + i} for i, keys in enumerate(SAMPLING)]


@pytest.fixture(scope="module")
def four_prompts(random_prompts):
    return random_prompts(4, 5, 20, seed=3)


@pytest.fixture(scope="module")
def expected(start_v2, four_prompts):
    """Parameters (or prompts) and plain V2's tokens by workload."""
    plain = start_v2(None)
    greedy = run(plain, four_prompts, GREEDY)
    long = [list(chain(*four_prompts))[:49]]
    return {
        "long": (long, run(plain, long, GREEDY)),
        "greedy": (GREEDY, greedy),
        "seeded": (SEEDED, run(plain, four_prompts, SEEDED)),
    }


def counts_of(engine) -> dict[str, float]:
    names = ("gsd_target_steps", "gsd_nodes_verified", "gsd_nodes_accepted_native", "gsd_nodes_accepted_merged")
    metrics = engine.metrics()
    return {name: metrics[name] for name in (*names, "gsd_nodes_accepted_ngram", "gsd_kv_rows_moved")}


@pytest.mark.parametrize("batch", [1, 4])
def test_both_runners_accept_the_same(start_engine, start_v2, four_prompts, expected, v2_options, batch):
    """Both runners verify, accept and move the same numbers of nodes.

    This test comes first: engines learn from accepted nodes, and these two must have learned the same. Requests are
    greedy, because vLLM's two runners sample different tokens with the same seed.
    """
    engines = start_engine(GSD, **v2_options), start_v2(GSD)
    changes = []
    for engine in engines:
        before = counts_of(engine)
        assert run(engine, four_prompts[:batch], GREEDY) == expected["greedy"][1][:batch]
        changes.append({name: value - before[name] for name, value in counts_of(engine).items()})
    assert changes[0] == changes[1]
    assert changes[0]["gsd_nodes_verified"] > 0
    assert changes[0]["gsd_kv_rows_moved"] > 0 or batch == 1


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_that_reads_hidden_states(
    start_engine, start_v2, tiny_eagle, tiny_eagle3, four_prompts, expected, v2_options, kind
):
    """V2 grows graphs on the device, with the same numbers of nodes as V1."""
    draft = tiny_eagle if kind == "eagle" else tiny_eagle3 / "llama"
    config = {**GSD, "model": str(draft), "sources": ["draft"]}
    engines = start_engine(config, **v2_options), start_v2(config)
    changes = []
    for engine in engines:
        before = counts_of(engine)
        assert run(engine, four_prompts[:2], GREEDY) == expected["greedy"][1][:2]
        changes.append({name: value - before[name] for name, value in counts_of(engine).items()})
    assert changes[0] == changes[1]
    assert changes[0]["gsd_nodes_accepted_native"] > 0


@pytest.mark.parametrize("split", [False, True], ids=["by shape", "by layer"])
def test_layers_in_several_attention_groups(start_v2, unlike_pair, four_prompts, expected, split):
    """The draft's heads differ in size from the target's, and layers may each have their own attention metadata."""
    engine = start_v2({**GSD, "model": str(unlike_pair.draft), "sources": ["draft"]}, split_groups=split)
    assert [len(names) for names in engine.call(attention_groups)] == ([1] * 4 if split else [2, 2])
    assert run(engine, four_prompts, GREEDY) == expected["greedy"][1]
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > 0
    assert metrics["gsd_chain_requests"] < metrics["gsd_target_steps"] / 2


READS = [*map(methodcaller, ("cpu", "tolist", "numpy", "nonzero")), any, max, lambda values: values[values > 0]]


@pytest.mark.parametrize("read", READS)
def test_reads_are_refused(read):
    with pytest.raises(AssertionError, match="read"), refused():
        read(torch.tensor([1, 2]))


def test_drafting_reads_nothing_from_the_device(start_v2, four_prompts, expected):
    """The host reads neither accepted nor drafted tokens, so it never waits for the device."""
    params, texts = expected["greedy"]
    engine = start_v2({**GSD, "num_speculative_tokens": 6})
    engine.call(refuse_reads)
    assert run(engine, four_prompts, params) == texts
    assert engine.call(guarded_calls) > 15
    assert engine.metrics()["gsd_nodes_accepted_native"] > 0


def test_completions_ends_and_prompts_in_chunks(start_v2, random_prompts):
    """Several completions of a prompt, stop tokens, both length limits, and prompts longer than a step."""
    prompts = random_prompts(3, 150, 151, seed=6)
    (last,) = random_prompts(1, 250, 250, seed=7)
    params = [
        {**GREEDY, "max_tokens": 4, "temperature": 1.0, "seed": 3, "n": 2},
        {**GREEDY, "max_tokens": 4},
        {**GREEDY, "stop_token_ids": list(range(3, 90))},
        {**GREEDY, "max_tokens": 14},
    ]
    answers = [start_v2(config).generate([*prompts, last], params) for config in (None, GSD)]
    theirs, ours = ([answer.completions for answer in engine_answers] for engine_answers in answers)
    assert ours == theirs
    assert len(ours[0]) == 2 and ours[0][0].tokens != ours[0][1].tokens
    assert ours[2][0].finish_reason == "stop"
    assert len(ours[3][0].tokens) == 6 and ours[3][0].finish_reason == "length"


def test_requests_that_stay_off_the_graph_are_counted(start_v2, four_prompts, expected):
    engine = start_v2(GSD)
    before = engine.metrics()
    params = {**GREEDY, "max_tokens": 4, "extra_args": {"gsd": False}}
    assert run(engine, four_prompts[:2], params) == [tokens[:4] for tokens in expected["greedy"][1][:2]]
    after = engine.metrics()
    assert after["gsd_fallbacks:opt_out"] - before.get("gsd_fallbacks:opt_out", 0) == 2
    assert after["spec_decode_num_drafts"] == before["spec_decode_num_drafts"]


def test_async_scheduling_with_preemption_and_prefix_caching(start_v2, four_prompts, expected):
    """Four requests that need two blocks each share six. One block of a long prompt is cached the second time."""
    scarce = {"block_size": 32, "num_gpu_blocks_override": 7, "max_model_len": 96}
    engine = start_v2({**GSD, "num_speculative_tokens": 4}, async_scheduling=True, **scarce)
    for workload in ("greedy", "seeded"):
        params, texts = expected[workload]
        assert run(engine, four_prompts, params) == texts
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["spec_decode_num_accepted_tokens"] > 0
    long, texts = expected["long"]
    for cached in (0, 32):
        (answer,) = engine.generate(long, GREEDY)
        assert [answer.tokens] == texts
        assert answer.num_cached_tokens == cached


@pytest.mark.parametrize(
    ("batch", "row_ms", "last_level_ms", "probe_after", "nodes"),
    [
        (1, 0.0, 0.0, 99, "all"),
        (1, 0.0, 50.0, 99, "all of few levels"),
        (4, 1.2, 0.0, 99, "some"),
        (4, 20.0, 0.0, 7, "none but a probe's"),
    ],
)
def test_auto_verifies_what_pays(start_v2, four_prompts, expected, batch, row_ms, last_level_ms, probe_after, nodes):
    """Verified nodes and drafted levels follow the planted costs; a probe makes the draft catch up on the text."""
    scarce = {"block_size": 32, "num_gpu_blocks_override": 7, "max_model_len": 96}
    engine = start_v2({**GSD, "num_speculative_tokens": 4}, async_scheduling=True, **scarce)
    before, drafted_before = engine.metrics(), engine.call(draft_seconds)
    engine.call(plant_costs, row_ms, probe_after, last_level_ms)
    engine.call(watch_levels)
    try:
        texts = run(engine, four_prompts[:batch], GREEDY)
    finally:
        engine.call(plant_costs, None)
    assert texts == expected["greedy"][1][:batch]
    after = engine.metrics()
    names = ("nodes_verified", "nodes_cut", "drafts_skipped", "target_steps", "draft_nodes", "draft_forwards")
    counts = {name: after[f"gsd_{name}"] - before.get(f"gsd_{name}", 0) for name in names}
    upstream = after["spec_decode_num_draft_tokens"] - before.get("spec_decode_num_draft_tokens", 0)
    assert upstream == counts["nodes_verified"]
    assert engine.call(draft_seconds) > drafted_before
    per_step = counts["nodes_verified"] / counts["target_steps"]
    levels = engine.call(levels_seen)
    if nodes.startswith("all"):
        # One or two steps draft nothing. One of them measures a plain step.
        assert per_step > 1 and counts["nodes_cut"] == 0 and 1 <= counts["drafts_skipped"] <= 2
        assert len(levels) >= counts["target_steps"] - counts["drafts_skipped"]
        assert max(levels) == (3 if last_level_ms == 0.0 else 2)
    elif nodes == "some":
        assert 0.2 < per_step < 3 and counts["nodes_cut"] > 0
    else:
        assert 0 < counts["nodes_verified"] <= 2 and counts["draft_nodes"] > 0
        assert counts["drafts_skipped"] > 0 and after["gsd_drafting"] == 0


def test_shared_suffixes(start_v2, four_prompts, expected):
    pytest.importorskip(
        "arctic_inference", reason="arctic-inference, an optional package, was not built by scripts/setup"
    )
    engine = start_v2({"model": None, "sources": ["shared"], "num_speculative_tokens": 8})
    params, texts = expected["greedy"]
    accepted = []
    engine.call(refuse_reads)
    engine.call(learn_a_step_late)
    for _ in range(2):
        before = engine.metrics()["gsd_nodes_accepted_shared"]
        assert run(engine, four_prompts, params) == texts
        accepted.append(engine.metrics()["gsd_nodes_accepted_shared"] - before)
    assert accepted[1] > 0.4 * sum(map(len, texts))


def test_tables_are_empty_once_requests_have_ended(start_v2, four_prompts):
    """Tables are empty however requests end. Four requests that need two of six blocks each are preempted."""
    pytest.importorskip(
        "arctic_inference", reason="arctic-inference, an optional package, was not built by scripts/setup"
    )
    scarce = {"block_size": 32, "num_gpu_blocks_override": 7, "max_model_len": 96}
    engine = start_v2({"model": None, "sources": ["shared"], "num_speculative_tokens": 8}, **scarce)
    for how, count in {"finish": 2, "abort": 2, "preempt": 4, "preempt and abort": 4}.items():
        prompts = [(2 * prompt)[:30] for prompt in four_prompts[:count]]
        preempted = engine.call(end_requests, prompts, how)
        assert bool(preempted) == (count == 4)
        assert not any(engine.call(tables).values()), how
