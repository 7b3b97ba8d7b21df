"""LoRA adapters on the target but not on the draft: output equals plain vLLM's with the same adapters.

The tests keep one adapter slot free. If all slots are taken, vLLM 0.32 on CPUs applies the last slot's adapter to
requests without one (see ``tests/contract/test_upstream.py``).
"""

import pytest
from adapters import RANK, build_adapter, generate_adapted
from engine_probes import forget_prefixes, state_at_rest
from engine_process import Params

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
ENGINE = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "block_size": 32}


@pytest.fixture(scope="module")
def all_adapters(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [build_adapter(folder / f"adapter{index}", tiny_pair.target, index) for index in range(5)]


@pytest.fixture(scope="module")
def adapters(all_adapters):
    return all_adapters[:2]


def ask(engine, prompts, params, adapters):
    """Answers, and by how much they increased each counter."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    before = engine.metrics()
    answers = engine.call(generate_adapted, prompts, [Params(keys) for keys in params], adapters)
    after = engine.metrics()
    return answers, {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, (int, float))}


def assert_same(plain, gsd, prompts, params, adapters):
    """Check that output equals plain vLLM's and that drafts were accepted; returns gsd's answers and counts."""
    theirs, _ = ask(plain, prompts, params, adapters)
    ours, counts = ask(gsd, prompts, params, adapters)
    for our, their in zip(ours, theirs, strict=True):
        (mine,), (other,) = our.completions, their.completions
        assert (mine.tokens, mine.finish_reason) == (other.tokens, other.finish_reason)
        for place, other_place in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            assert place == pytest.approx(other_place, abs=1e-4)
    assert counts["spec_decode_num_accepted_tokens"] > 0.1 * counts["gsd_target_steps"]
    assert not any(value for name, value in counts.items() if name.startswith("gsd_fallbacks"))
    return ours, counts


def seeded(count, **keys):
    return [{**GREEDY, "temperature": 1.0, "seed": 30 + i, **keys} for i in range(count)]


@pytest.mark.parametrize("which", [0, 1])
def test_an_adapter(plain, gsd, prompts, adapters, which):
    chosen = [adapters[which]] * len(prompts)
    without, _ = ask(plain, prompts, GREEDY, [None] * len(prompts))
    answers, _ = assert_same(plain, gsd, prompts, GREEDY, chosen)
    assert all(new.tokens != old.tokens for new, old in zip(answers, without, strict=True))  # every text differs
    assert_same(plain, gsd, prompts, seeded(len(prompts)), chosen)


def test_one_request_at_a_time(plain, gsd, prompts, adapters):
    for prompt, adapter in zip(prompts, [None, *adapters], strict=False):
        assert_same(plain, gsd, [prompt], GREEDY, [adapter])


def test_mixed_batches(plain, gsd, random_prompts, adapters):
    """Requests with two adapters and with none share batches, with various other features."""
    prompts = random_prompts(18, seed=31)
    chosen = [(None, *adapters)[index % 3] for index in range(len(prompts))]
    features = [
        GREEDY,
        {**GREEDY, "presence_penalty": 0.7},
        {**GREEDY, "logprobs": 3},
        *seeded(2, min_p=0.1),
        {**GREEDY, "extra_args": {"gsd": True}, "max_tokens": 9},
    ]
    answers, _ = assert_same(plain, gsd, prompts, [features[i // 3] for i in range(len(prompts))], chosen)
    alone = [ask(gsd, [prompts[i]], GREEDY, [chosen[i]])[0][0] for i in range(3)]
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in answers[:3]]


class TestPrefixCaching:
    """Only the target's KV depends on the adapter, not the draft's. Blocks are shared only within an adapter."""

    @pytest.fixture
    def cold(self, gsd):
        gsd.call(forget_prefixes)
        return gsd

    @pytest.fixture(scope="class")
    def prompts(self, random_prompts):
        return random_prompts(4, 140, 200, seed=33)

    def test_adapters_share_nothing(self, plain, cold, prompts, adapters):
        rows = []
        for adapter in (adapters[0], adapters[1], None):
            answers, counts = assert_same(plain, cold, prompts, GREEDY, [adapter] * 4)
            assert sum(answer.num_cached_tokens for answer in answers) == 0
            rows.append(counts["gsd_draft_rows"])
        for adapter, cold_rows in zip((adapters[0], adapters[1], None), rows, strict=True):
            answers, counts = assert_same(plain, cold, prompts, GREEDY, [adapter] * 4)
            cached = sum(answer.num_cached_tokens for answer in answers)
            assert cached > sum(map(len, prompts)) - 32 * len(prompts)
            saved = cold_rows - counts["gsd_draft_rows"]  # cached blocks have draft KV too
            assert saved == pytest.approx(cached, abs=0.1 * cold_rows)

    def test_a_prefix_that_only_the_target_has_seen(self, plain, cold, prompts, adapters):
        """The prompts were first served with the adapter but without speculation: the draft catches up on them."""
        chosen = [adapters[1]] * 4
        _, before = assert_same(plain, cold, prompts, GREEDY, chosen)
        cold.call(forget_prefixes)
        ask(cold, prompts, {**GREEDY, "max_tokens": 4, "extra_args": {"gsd": False}}, chosen)
        answers, counts = assert_same(plain, cold, prompts, GREEDY, chosen)
        assert sum(answer.num_cached_tokens for answer in answers) > 0
        for name in ("gsd_draft_rows", "gsd_target_steps", "spec_decode_num_accepted_tokens"):
            assert counts[name] == pytest.approx(before[name], rel=0.05)

    def test_one_prompt_with_all_adapters_at_once(self, plain, cold, prompts, adapters):
        chosen = [*adapters, None] * 4
        many = [prompt for prompt in prompts for _ in range(3)]
        for _ in range(2):
            assert_same(plain, cold, many, GREEDY, chosen)


def test_nothing_is_left(gsd, prompts, adapters):
    at_rest = gsd.call(state_at_rest)
    ask(gsd, prompts, GREEDY, [*adapters, None, *adapters, None, *adapters])
    assert gsd.call(state_at_rest) == at_rest


def test_more_adapters_than_slots(plain, gsd, random_prompts, all_adapters):
    """Adapters wait for a slot and are reloaded. Keep this test last in the file: afterwards, no slot is free."""
    prompts = random_prompts(15, seed=35)
    assert_same(plain, gsd, prompts, {**GREEDY, "max_tokens": 20}, all_adapters * 3)
