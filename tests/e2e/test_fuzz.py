"""Random batches of random requests on random graphs: float32 text and logprobs equal plain vLLM's.

    scripts/fuzz [--examples 5000] [--seed 7]

Two engines run all examples. Before each example, the draft's candidates are perturbed (shuffled, repeated tokens, flat
or steep probabilities) and the limits of graphs are drawn at random, so that graphs branch and merge in all ways.
"""

import contextlib
from functools import partial

import numpy as np
import pytest
from engine_process import Engine, EngineError, Params, draft_every_level, model_runner
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from tiny_pair import VOCAB_SIZE

GSD = {"num_speculative_tokens": 16, "max_depth": 6, "top_k": 4}
OPTIONS = {"max_model_len": 96, "max_num_seqs": 8}
# Only gsd's prompts are chunked, because vLLM's CPU runner fails on chunked prompts of seeded requests.
CHUNKED = {"max_num_batched_tokens": 64}
LOGPROB_TOLERANCE = 2e-3

# --- requests -----------------------------------------------------------------------------------------

TOKENS = st.integers(3, VOCAB_SIZE - 1)
GRAMMARS = [{"regex": "[a-d]{2,9}"}, {"choice": ["abba", "abc", "xyz"]}, {"json": {"type": "integer"}}]
# Each request has some of these parameters. They never forbid all tokens.
SOME = {
    "top_k": st.sampled_from([1, 3, 20]),
    "top_p": st.sampled_from([0.3, 0.8, 0.95]),
    "min_p": st.sampled_from([0.02, 0.2]),
    "repetition_penalty": st.sampled_from([0.8, 1.3, 1.8]),
    "presence_penalty": st.sampled_from([-1.0, 0.7, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.8, 2.0]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.0, 3.0, 8.0]), min_size=1, max_size=20),
    "allowed_token_ids": st.integers(4, 300).map(lambda first: list(range(first, first + 40))),
    "stop_token_ids": st.lists(TOKENS, min_size=1, max_size=60),
    "stop": st.lists(st.sampled_from(["a", "e", "w3", "1", "wx"]), min_size=1, max_size=2),
    "min_tokens": st.integers(1, 8),
    "logprobs": st.sampled_from([0, 1, 4]),
    "prompt_logprobs": st.sampled_from([0, 2]),
    "n": st.just(2),
    "ignore_eos": st.just(True),
    "extra_args": st.just({"gsd": False}),
}


@st.composite
def requests(draw) -> tuple[list[int], Params]:
    """A prompt and its parameters. Half of the prompts have few different tokens, so that there is text to copy."""
    few = draw(st.booleans())
    prompt = draw(st.lists(st.integers(10, 14) if few else TOKENS, min_size=1, max_size=24))
    keys = draw(st.fixed_dictionaries({"max_tokens": st.integers(1, 16)}, optional=SOME))
    keys["min_tokens"] = min(keys.get("min_tokens", 0), keys["max_tokens"])
    keys["seed"] = draw(st.integers(0, 1000))
    keys["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.6]))
    if keys["temperature"] == 0:
        keys["n"] = 1
    words = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=8)) if draw(st.booleans()) else None
    if draw(st.integers(0, 7)) == 0:
        keys["structured_outputs"] = draw(st.sampled_from(GRAMMARS))
        # A grammar allows few tokens. Drop parameters that could forbid the last of them.
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids", "min_tokens"):
            keys.pop(name, None)
        words = None
    return prompt, Params(keys, bad_words_token_ids=words)


@st.composite
def shapes(draw) -> dict:
    """Limits of a batch's graphs and perturbations of its drafts."""
    sources = st.sampled_from([["draft", "ngram"], ["draft"], ["draft", "ngram"], ["ngram"]])
    limits = {
        "sources": draw(sources),
        "max_depth": draw(st.integers(1, GSD["max_depth"])),
        "theta_sib": draw(st.sampled_from([0.0, 0.03, 0.5])),
        "theta_prob": draw(st.sampled_from([0.0, 0.02, 0.2])),
        "merge_ngram": draw(st.integers(0, 3)),
    }
    return {
        "limits": limits,
        "nodes": draw(st.integers(1, GSD["num_speculative_tokens"])),
        "degree": draw(st.integers(1, GSD["top_k"])),
        "shuffled": draw(st.sampled_from([0.0, 0.2, 0.6])),
        "repeated": draw(st.sampled_from([0.0, 0.3])),
        "power": draw(st.sampled_from([1.0, 0.2, 3.0])),
        "seed": draw(st.integers(0, 1 << 20)),
    }


def draft(llm, shape: dict) -> None:
    """Make the engine draft with these limits and perturbations."""
    speculation = model_runner(llm).speculation
    drafter, model = speculation.drafter, speculation.drafter.model
    speculation.config = drafter.config = speculation.config.model_copy(update=shape["limits"])
    speculation.num_nodes = shape["nodes"]
    random, exact = np.random.default_rng(shape["seed"]), type(model).candidates

    def candidates(hidden, k):
        probs, tokens = (part.copy() for part in exact(model, hidden, k))
        shuffled = random.random(len(tokens)) < shape["shuffled"]
        tokens[shuffled] = random.permuted(tokens[shuffled], axis=1)
        repeated = random.random(tokens.shape) < shape["repeated"]
        tokens[repeated] = random.integers(10, 14, repeated.sum())
        tokens[:, shape["degree"] :] = -1
        return probs ** np.float32(shape["power"]), tokens

    model.candidates = candidates


REPETITIVE = [
    ([10, 11, 12, 10, 11], Params({"max_tokens": 16, "ignore_eos": True, "seed": i, "temperature": 0.4 * (i % 2)}))
    for i in range(4)
]
MERGING = {
    "limits": {"sources": ["draft"], "max_depth": 6, "theta_sib": 0.0, "theta_prob": 0.0, "merge_ngram": 1},
    "nodes": 16,
    "degree": 4,
    "shuffled": 0.2,
    "repeated": 0.3,
    "power": 0.2,
    "seed": 3,
}

# --- the check ----------------------------------------------------------------------------------------


def assert_same_logprobs(ours, theirs):
    assert (ours is None) == (theirs is None)
    for our_place, their_place in zip(ours or [], theirs or [], strict=True):
        expected = None if their_place is None else pytest.approx(their_place, abs=LOGPROB_TOLERANCE)
        assert our_place == expected


def assert_same(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        for one, other in zip(our.completions, their.completions, strict=True):
            assert one.tokens == other.tokens
            assert (one.text, one.finish_reason, one.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert_same_logprobs(one.logprobs, other.logprobs)
        assert_same_logprobs(our.prompt_logprobs, their.prompt_logprobs)


class Restarted:
    """An engine that is restarted after an error, because the error may leave requests that never finish."""

    def __init__(self, *args, **options):
        self.start = partial(Engine, *args, **options)
        self.engine = self.start()

    def call(self, method: str, *args):
        try:
            return getattr(self.engine, method)(*args)
        except EngineError:
            self.engine.kill()
            self.engine = self.start()
            raise


@pytest.fixture(scope="module")
def engines(text_pair):
    config = {"method": "gsd", "model": str(text_pair.draft), **GSD}
    with contextlib.ExitStack() as stack:
        plain = Restarted(text_pair.target, None, **OPTIONS)
        stack.callback(lambda: plain.engine.close())
        gsd = Restarted(text_pair.target, config, [draft_every_level], **OPTIONS, **CHUNKED)
        stack.callback(lambda: gsd.engine.close())
        yield plain, gsd


def test_fuzz(engines, pytestconfig):
    plain, gsd = engines
    number = pytestconfig.getoption("fuzz_seed")
    print(f"seed {number}")

    @seed(number)
    @settings(
        max_examples=pytestconfig.getoption("examples"),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(batch=st.lists(requests(), min_size=1, max_size=5), shape=shapes())
    @example(batch=REPETITIVE, shape=MERGING)  # how often random examples merge nodes varies much
    def check(batch, shape):
        prompts, params = map(list, zip(*batch, strict=True))
        gsd.call("call", draft, shape)
        assert_same(gsd.call("generate", prompts, params), plain.call("generate", prompts, params))

    check()
    counts = gsd.call("metrics")
    examples = pytestconfig.getoption("examples")
    assert counts["spec_decode_num_accepted_tokens"] > examples
    if examples < 200:
        return  # the first examples are simple, and may merge no nodes
    assert min(counts["gsd_nodes_merged"], counts["gsd_kv_rows_moved"], counts["gsd_fallbacks:opt_out"]) > examples / 10
