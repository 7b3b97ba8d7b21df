"""Priority scheduling: vLLM decides which requests are preempted, and the output of all equals plain vLLM's."""

import pytest
from engine_probes import generate_by_priority, state_at_rest
from engine_process import Params

GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
# Twelve requests that need up to four KV blocks each share eleven blocks.
ENGINE = {"scheduling_policy": "priority", "block_size": 32, "num_gpu_blocks_override": 11, "max_model_len": 128}


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return random_prompts(12, 20, 40, seed=41)


def completions_of(answers):
    return [[(one.tokens, one.finish_reason, one.stop_reason) for one in answer.completions] for answer in answers]


def seeded(count, **keys):
    return [{**GREEDY, "temperature": 1.0, "seed": 60 + i, **keys} for i in range(count)]


@pytest.mark.parametrize("kind", ["greedy", "seeded", "mixed"])
def test_late_and_urgent_requests(plain, gsd, prompts, kind):
    mixed = [
        *[{**GREEDY, "ignore_eos": False}] * 3,
        *seeded(3, n=2, max_tokens=30),
        *seeded(2, presence_penalty=0.5),
        *[{**GREEDY, "logprobs": 1}] * 4,
    ]
    params = {"greedy": [GREEDY] * 12, "seeded": seeded(12), "mixed": mixed}[kind]
    params = [Params(keys) for keys in params]
    priorities = [5, 9, 7, 5, 9, 7, 5, 9, 7, 1, 0, 0]
    expected, _ = plain.call(generate_by_priority, prompts, params, priorities, 3)
    at_rest = gsd.call(state_at_rest)
    before = gsd.metrics()
    answers, done = gsd.call(generate_by_priority, prompts, params, priorities, 3)
    after = gsd.metrics()
    assert completions_of(answers) == completions_of(expected)
    counts = {name: after[name] - before[name] for name in ("num_preemptions", "gsd_target_steps")}
    assert counts["num_preemptions"] > 0
    accepted = after["spec_decode_num_accepted_tokens"] - before["spec_decode_num_accepted_tokens"]
    assert accepted > 0.1 * counts["gsd_target_steps"]
    if kind != "mixed":  # urgent requests arrive last and finish before low-priority ones
        assert max(done.index(index) for index in (9, 10, 11)) < min(done.index(index) for index in (1, 4, 7))
    assert gsd.call(state_at_rest) == at_rest


def test_the_best_of_several(plain, gsd, prompts):
    """The most probable of ``n`` completions, chosen by their logprobs."""
    params = [{**keys, "n": 4, "logprobs": 0, "max_tokens": 20} for keys in seeded(4)]

    def best(engine):
        answers = engine.generate(prompts[:4], params)
        sums = [
            [
                sum(place[token] for place, token in zip(completion.logprobs, completion.tokens, strict=True))
                for completion in answer.completions
            ]
            for answer in answers
        ]
        chosen = [max(range(4), key=completions.__getitem__) for completions in sums]
        return [answer.completions[index].tokens for answer, index in zip(answers, chosen, strict=True)], sums

    (ours, our_sums), (theirs, their_sums) = best(gsd), best(plain)
    assert ours == theirs
    for our, their in zip(our_sums, their_sums, strict=True):
        assert our == pytest.approx(their, abs=1e-3)
