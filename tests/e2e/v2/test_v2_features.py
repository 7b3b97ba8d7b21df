"""Every request feature on Model Runner V2 with async scheduling: it runs on graphs and equals plain V2.

V1's ``test_every_feature`` tests the same list with longer texts. One engine serves all tests.
"""

import numpy as np
import pytest
from engine_probes import generate_by_priority
from engine_process import Params, model_runner
from request_features import FEATURES, MODES, asked, asked_with_mode, assert_on_graph, assert_same
from v2_engine import V2Engine

from vllm_gsd.engine.v2 import walk

LENGTH = 8
ALONE = 5  # length of texts that are generated one by one, which takes many slow steps
WITHIN = 1e-3  # allowed difference of logprobs
GREEDY = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
ENGINE = {
    "logits_processors": ["custom_v2_processor:AutomatonProcessor"],
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "scheduling_policy": "priority",
    "skip_tokenizer_init": False,
    # Four requests with prompts of 30 tokens need two blocks each and share six.
    "block_size": 32,
    "num_gpu_blocks_override": 7,
    "max_model_len": 96,
}
NAMES = [*FEATURES]


@pytest.fixture(scope="module")
def plain(engine_pool, text_pair):
    return engine_pool.engine("plain", lambda: V2Engine(text_pair.target, None, **ENGINE))


@pytest.fixture(scope="module")
def gsd(engine_pool, text_pair):
    config = {"method": "gsd", "model": str(text_pair.draft), "num_speculative_tokens": 6, "max_depth": 3}
    return engine_pool.engine("gsd", lambda: V2Engine(text_pair.target, config, async_scheduling=True, **ENGINE))


@pytest.fixture(scope="module")
def four_prompts(random_prompts):
    return random_prompts(4, 5, 20, seed=3)


@pytest.fixture(scope="module")
def every(plain, four_prompts):
    """``every(seed, length)`` gives prompts, parameters for every feature (greedy without a seed) and plain answers."""
    free = [answer.completions[0] for answer in plain.generate(four_prompts, GREEDY)]
    prompts = [four_prompts[index % 4] for index in range(len(NAMES))]

    def make(seed: int | None, length: int):
        params = [asked(name, free[index % 4], length, seed and seed + index) for index, name in enumerate(NAMES)]
        return prompts, params, plain.generate(prompts, params)

    return make


@pytest.mark.parametrize("seed", [None, 50], ids=["greedy", "seeded"])
def test_equal_in_batches_of_four(gsd, every, seed):
    prompts, params, expected = every(seed, LENGTH)
    before = gsd.metrics()
    answers = gsd.generate(prompts, params)
    assert_same(answers, expected, WITHIN)
    assert_on_graph(before, gsd.metrics(), answers)


@pytest.mark.parametrize("seed", [None, 90], ids=["greedy", "seeded"])
def test_equal_alone(gsd, every, seed):
    """Every second feature greedily, the others seeded."""
    prompts, params, expected = (rows[bool(seed) :: 2] for rows in every(seed, ALONE))
    before = gsd.metrics()
    answers = [gsd.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert_same(answers, expected, WITHIN)
    assert_on_graph(before, gsd.metrics(), answers)


def set_logprobs_mode(llm, mode: str) -> None:
    """Set the mode as if the engine had been started with it."""
    runner = model_runner(llm)
    runner.sampler.logprobs_mode = runner.prompt_logprobs_worker.logprobs_mode = mode


def set_most_rows(llm, rows: int | None) -> None:
    """Sample this many rows of a batch in one call, as with a vocabulary so large that no more fit; None for all."""
    walk.MOST_LOGITS = 1 << 28 if rows is None else rows * model_runner(llm).vocab_size


@pytest.fixture
def few_rows(gsd):
    gsd.call(set_most_rows, 3)
    yield
    gsd.call(set_most_rows, None)


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_logprobs(plain, gsd, few_rows, four_prompts, mode):
    """The rows of the batch are sampled in several calls."""
    params, answers = [asked_with_mode(index, 5) for index in range(4)], []
    for engine in (plain, gsd):
        engine.call(set_logprobs_mode, mode)
        answers.append(engine.generate(four_prompts, params))
        engine.call(set_logprobs_mode, "raw_logprobs")
    assert_same(*answers, WITHIN)


def test_logprobs_of_a_prompt_of_one_token(plain, gsd, four_prompts):
    """It starts beside running requests, where vLLM pads it, in the slot of a request that has ended."""
    params = [Params({**GREEDY, "max_tokens": 3 if i == 1 else LENGTH, "prompt_logprobs": 1}) for i in range(5)]
    expected, answers = (engine.generate([*four_prompts, [9]], params) for engine in (plain, gsd))
    assert_same(answers, expected, WITHIN)
    assert len(answers[4].prompt_logprobs) == 1


def test_late_and_urgent_requests(plain, gsd, random_prompts):
    """An urgent request preempts others and finishes first, although it arrives last."""
    prompts = random_prompts(5, 28, 30, seed=41)
    params = [Params({**GREEDY, "max_tokens": 14, "temperature": float(i % 2), "seed": i}) for i in range(5)]
    arguments = prompts, params, [5, 9, 7, 5, 0], 1
    expected, _ = plain.call(generate_by_priority, *arguments)
    before = gsd.metrics()
    answers, done = gsd.call(generate_by_priority, *arguments)
    after = gsd.metrics()
    assert_same(answers, expected, WITHIN)
    assert after["num_preemptions"] > before.get("num_preemptions", 0)
    assert done.index(4) < done.index(1)
    assert_on_graph(before, after, answers)


def test_unseeded_texts_have_the_distribution_of_the_target(plain, gsd, four_prompts):
    """Top-k 2 allows four texts of two tokens. A chi-square test compares them with the target's probabilities."""
    prompt = four_prompts[0]

    def best_two(text) -> dict[int, float]:
        (answer,) = plain.generate([text], {"temperature": 0, "max_tokens": 1, "logprobs": 2, "ignore_eos": True})
        best = sorted(answer.completions[0].logprobs[0].items(), key=lambda entry: -entry[1])[:2]
        chances = np.exp([logprob for _, logprob in best])
        return dict(zip([token for token, _ in best], chances / chances.sum(), strict=True))

    chances = {
        (first, second): one * two
        for first, one in best_two(prompt).items()
        for second, two in best_two([*prompt, first]).items()
    }
    params = {"temperature": 1.0, "top_k": 2, "max_tokens": 2, "ignore_eos": True, "n": 4}
    answers = gsd.generate([prompt] * 16, params)
    texts = [tuple(one.tokens) for answer in answers for one in answer.completions]
    assert set(texts) <= chances.keys()
    expected = len(texts) * np.array([*chances.values()])
    counts = np.array([texts.count(text) for text in chances])
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # p = 0.001 with three degrees of freedom
