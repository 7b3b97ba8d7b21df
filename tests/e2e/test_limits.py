"""Edge cases: length limits, stop conditions, aborts and scarce KV blocks. Tokens always equal plain vLLM's."""

import numpy as np
import pytest
from engine_probes import generate_and_abort, state_at_rest, steps_with_tokens
from engine_process import model_runner, run

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def seeded(count, **keys):
    return [{**GREEDY, "temperature": 1.0, "seed": 50 + i, **keys} for i in range(count)]


def answers_and_counts(engine, prompts, params):
    """Completions, and by how much the run increased each counter."""
    before = engine.metrics()
    answers = [answer.completions for answer in engine.generate(prompts, params)]
    after = engine.metrics()
    return answers, {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, (int, float))}


def tokens_of(answers):
    return [completions[0].tokens for completions in answers]


def assert_same(plain, gsd, prompts, params, drafts=True):
    """Check that tokens, finish and stop reasons equal plain vLLM's; returns gsd's answers and counters."""
    expected, _ = answers_and_counts(plain, prompts, params)
    got, counts = answers_and_counts(gsd, prompts, params)
    assert got == expected
    assert (counts["spec_decode_num_accepted_tokens"] > 0) == drafts
    return got, counts


def cut_tokens(answers, counts):
    """The number of accepted tokens that a stop condition discarded."""
    emitted = counts["gsd_target_steps"] + counts["spec_decode_num_accepted_tokens"]
    return emitted - sum(map(len, tokens_of(answers)))


class TestLengths:
    @pytest.mark.parametrize("max_tokens", range(1, 9))
    def test_few_tokens(self, plain, gsd, prompts, max_tokens):
        for params in ({**GREEDY, "max_tokens": max_tokens}, seeded(len(prompts), max_tokens=max_tokens)):
            answers, counts = assert_same(plain, gsd, prompts, params, drafts=max_tokens > 2)
            assert {len(tokens) for tokens in tokens_of(answers)} == {max_tokens}
            assert {completions[0].finish_reason for completions in answers} == {"length"}
            assert cut_tokens(answers, counts) == 0  # graphs are no deeper than the remaining text
            assert (counts["gsd_draft_rows"] > 0) == (max_tokens > 2)  # no drafts: no prompt is read

    @pytest.mark.parametrize("max_tokens", [None, 1000])
    def test_max_model_len(self, start_engine, random_prompts, max_tokens):
        engines = [start_engine(gsd, max_model_len=64, block_size=32) for gsd in (None, {})]
        prompts = [*random_prompts(12, 1, 63, seed=3), *random_prompts(4, 60, 63, seed=4)]
        for params in ({**GREEDY, "max_tokens": max_tokens}, seeded(16, max_tokens=max_tokens)):
            answers, _ = assert_same(*engines, prompts, params)
            for prompt, (completion,) in zip(prompts, answers, strict=True):
                assert len(prompt) + len(completion.tokens) == 64
                assert completion.finish_reason == "length"

    def test_one_request_at_the_end_does_not_hold_the_others_back(self, start_engine, random_prompts):
        gsd = start_engine({}, max_model_len=64, block_size=32)
        early, late = random_prompts(1, 8, 8, seed=3), random_prompts(1, 44, 44, seed=4)
        params = [{**GREEDY, "max_tokens": 20}]
        alone = [answers_and_counts(gsd, prompts, params)[1] for prompts in (early, late)]
        _, together = answers_and_counts(gsd, early + late, params * 2)
        for name in ("gsd_target_steps", "spec_decode_num_accepted_tokens"):
            assert together[name] == alone[0][name] + alone[1][name]


class TestStops:
    """Text ends where plain vLLM ends it, even if the target has accepted tokens beyond that."""

    def test_stop_tokens(self, plain, gsd, prompts):
        free = run(plain, prompts, GREEDY)
        cut = 0
        for place in range(1, 13):
            params = [{**GREEDY, "stop_token_ids": [tokens[place]]} for tokens in free]
            answers, counts = assert_same(plain, gsd, prompts, params)
            for (completion,), tokens in zip(answers, free, strict=True):
                assert completion.finish_reason == "stop"
                assert completion.stop_reason == completion.tokens[-1] == tokens[place]
                assert tokens[place] not in completion.tokens[:-1]
            cut += cut_tokens(answers, counts)
        assert cut > 20

    def test_stop_tokens_while_sampling(self, plain, gsd, prompts):
        params = seeded(len(prompts), stop_token_ids=list(range(3, 60)), include_stop_str_in_output=True)
        answers, counts = assert_same(plain, gsd, prompts, params)
        assert "stop" in {completion.finish_reason for (completion,) in answers}
        assert cut_tokens(answers, counts) == 0  # seeded walks end with the text

    def test_eos(self, plain, gsd, tiny_pair, random_prompts):
        prompts = random_prompts(32, seed=8)
        answers, counts = assert_same(plain, gsd, prompts, {**GREEDY, "ignore_eos": False})
        ended = [completion for (completion,) in answers if completion.finish_reason == "stop"]
        assert len(ended) > 3
        assert all(completion.tokens.index(tiny_pair.eos) == len(completion.tokens) - 1 for completion in ended)
        assert cut_tokens(answers, counts) > 0

    @pytest.mark.parametrize("included", [False, True])
    def test_stop_strings(self, start_engine, prompts, included):
        """Each token is one word, so a stop string of two words often ends in the middle of an accepted path."""
        plain, gsd = (start_engine(gsd, skip_tokenizer_init=False) for gsd in (None, {}))
        free = run(plain, prompts, GREEDY)
        cut = 0
        for place in (4, 9, 10, 11, 15):
            stops = [f"w{tokens[place]} w{tokens[place + 1]}" for tokens in free]
            keys = {**GREEDY, "include_stop_str_in_output": included, "skip_special_tokens": False}
            params = [{**keys, "stop": [stop]} for stop in stops]
            answers, counts = assert_same(plain, gsd, prompts, params)
            for (completion,), stop in zip(answers, stops, strict=True):
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
                assert completion.text.endswith(stop) == included
            cut += cut_tokens(answers, counts)
        assert cut > 5


class TestAborts:
    @pytest.mark.parametrize("after", [1, 2, 5])
    def test_the_others_finish(self, plain, gsd, random_prompts, after):
        prompts = random_prompts(12, seed=9)
        expected = run(plain, prompts, GREEDY)
        at_rest = gsd.call(state_at_rest)
        aborted = [0, 3, 4, 11]
        answers = gsd.call(generate_and_abort, prompts, GREEDY, aborted, after)
        assert [index for index, answer in enumerate(answers) if answer is None] == aborted
        assert all(answer is None or answer.tokens == tokens for answer, tokens in zip(answers, expected, strict=True))
        assert gsd.call(state_at_rest) == at_rest

    def test_all_at_once_and_the_engine_lives_on(self, plain, gsd, prompts):
        at_rest = gsd.call(state_at_rest)
        assert gsd.call(generate_and_abort, prompts, GREEDY, list(range(8)), 3) == [None] * 8
        assert gsd.call(state_at_rest) == at_rest
        assert_same(plain, gsd, prompts, GREEDY)


class TestScheduling:
    def test_more_requests_than_seats(self, start_engine, plain, random_prompts):
        gsd = start_engine({}, max_num_seqs=3)
        prompts = random_prompts(17, seed=10)
        params = [{**keys, "max_tokens": 3 + 7 * i % 40} for i, keys in enumerate(seeded(17))]
        assert_same(plain, gsd, prompts, params)

    @pytest.mark.parametrize("nodes", [5, 16])
    def test_preemption(self, start_engine, plain, random_prompts, nodes):
        """Twelve requests that need up to four KV blocks each share eleven blocks."""
        scarce = {"block_size": 32, "num_gpu_blocks_override": 11, "max_model_len": 128}
        gsd = start_engine({"num_speculative_tokens": nodes}, **scarce)
        prompts = random_prompts(12, 20, 40, seed=11)
        at_rest = gsd.call(state_at_rest)
        for params in ({**GREEDY, "max_tokens": 60}, seeded(12, max_tokens=60)):
            _, counts = assert_same(plain, gsd, prompts, params)
            assert counts["num_preemptions"] > 0
        assert gsd.call(state_at_rest) == at_rest

    def test_prefix_caching(self, start_engine, random_prompts):
        plain, gsd = (start_engine(gsd, block_size=32) for gsd in (None, {}))
        prompts = [prompt + tail for prompt in random_prompts(2, 150, 200, seed=12) for tail in ([], [5], [6, 7] * 30)]
        expected = run(plain, prompts, GREEDY)
        assert run(gsd, prompts, GREEDY) == expected
        again = gsd.generate(prompts, GREEDY)
        assert [answer.tokens for answer in again] == expected
        for answer, prompt in zip(again, prompts, strict=True):
            assert answer.num_cached_tokens >= len(prompt) - 32

    @pytest.mark.parametrize("rows", [64, 100])
    def test_chunked_prefill(self, start_engine, plain, random_prompts, rows):
        """Prompts are read in several chunks while other requests decode.

        The reference does not chunk prompts: on CPUs, vLLM 0.32 itself fails if a seeded request's prompt is chunked
        ("CPU Generator does not use offset").
        """
        gsd = start_engine({}, max_num_batched_tokens=rows, enable_chunked_prefill=True, max_num_seqs=8)
        prompts = [*random_prompts(6, 150, 400, seed=13), *random_prompts(10, 5, 20, seed=14)]
        mixed = [prompts[i * 7 % 16] for i in range(16)]
        assert_same(plain, gsd, mixed, [{**GREEDY, "max_tokens": 8 + 5 * i % 40} for i in range(16)])
        assert_same(plain, gsd, mixed, {**GREEDY, "presence_penalty": 0.6})
        assert_same(plain, gsd, mixed, seeded(16))

    def test_no_request_waits_for_nodes_of_others(self, start_engine, plain, random_prompts):
        """Two whole graphs fill a step, yet every request gets tokens in nearly every step."""
        gsd = start_engine({"budget": 16}, max_num_batched_tokens=34, max_num_seqs=6)
        prompts = random_prompts(8, 3, 5, seed=18)
        steps = gsd.call(steps_with_tokens, prompts, GREEDY)
        assert max(np.diff(those).max() for those in steps) <= 2
        assert max(those[0] for those in steps[:6]) <= 2
        assert_same(plain, gsd, prompts, GREEDY)

    def test_a_graph_larger_than_a_step(self, start_engine, plain, random_prompts):
        """Of a cached prompt one token is left, which upstream would start with placeholders for a whole graph."""
        gsd = start_engine({"num_speculative_tokens": 64, "budget": 64}, max_num_batched_tokens=64, block_size=32)
        (prompt,) = random_prompts(1, 65, 65, seed=19)
        assert_same(plain, gsd, [prompt], GREEDY)
        (steps,) = gsd.call(steps_with_tokens, [prompt], GREEDY)
        assert steps[0] == 0

    @pytest.mark.parametrize(("block_size", "nodes"), [(32, 5), (32, 23), (64, 23), (128, 5)])
    def test_block_sizes(self, start_engine, plain, random_prompts, block_size, nodes):
        gsd = start_engine({"num_speculative_tokens": nodes}, block_size=block_size)
        prompts = random_prompts(10, 5, 140, seed=15)
        for params in (GREEDY, seeded(10)):
            assert_same(plain, gsd, prompts, params)


def test_nothing_is_left_of_a_thousand_requests(gsd, random_prompts):
    before = gsd.call(state_at_rest)
    prompts = random_prompts(1000, 3, 12, seed=16)
    params = [{**GREEDY, "max_tokens": 1 + i % 6, **({"extra_args": {"gsd": False}} if i % 9 == 0 else {})}
              for i in range(1000)]  # fmt: skip
    assert [len(tokens) for tokens in run(gsd, prompts, params)] == [keys["max_tokens"] for keys in params]
    after = gsd.call(state_at_rest)
    assert after == before
    assert not any(count for name, count in after.items() if name != "free_blocks")


def one_draft_of_nan(llm) -> None:
    """Put a NaN into the first row of the draft model's next logits."""
    model = model_runner(llm).speculation.drafter.model.model
    compute = model.compute_logits

    def with_nan(hidden):
        logits = compute(hidden)
        logits[0, 5] = float("nan")
        model.compute_logits = compute
        return logits

    model.compute_logits = with_nan


def what_was_learned(llm) -> list[float]:
    """All numbers that the planner has learned from earlier steps."""
    planner = model_runner(llm).speculation.planner
    learned = planner.calibration.factor, planner.calibration.accepted, planner.children, planner.worth, planner.levels
    return [float(number) for numbers in learned for number in numbers.ravel()]


def test_a_draft_that_emits_nan_once(plain, gsd, prompts):
    """The NaN is counted, and it affects neither the text nor later drafts."""
    _, healthy = assert_same(plain, gsd, prompts, GREEDY)
    gsd.call(one_draft_of_nan)
    before = gsd.metrics()["gsd_draft_rows_invalid"]
    assert_same(plain, gsd, prompts, GREEDY)
    assert gsd.metrics()["gsd_draft_rows_invalid"] - before == 1
    assert np.isfinite(gsd.call(what_was_learned)).all()
    _, later = assert_same(plain, gsd, prompts, GREEDY)
    accepted = "spec_decode_num_accepted_tokens"
    assert later[accepted] > 0.8 * healthy[accepted]
