"""Tests statistically whether sampling on the graph has the same distribution as sampling with plain vLLM.

This is a two-sample permutation test. If both engines draw from the same distribution, it is chance which of them drew
a given text. So the two samples are pooled and dealt out again at random many times, and the total-variation distance
between the samples is compared with the distances of these deals. The script compares two runs of plain vLLM in the
same way to show the level of noise.
"""

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
from engine_process import Engine

VOCAB_SIZE = 32
PROMPT = [5, 9, 3, 17, 9, 3]
LENGTH = 4
# Sampling parameters by name. Penalties are large and texts short, so that the test notices a penalty that does not
# count the tokens on a node's path.
SETTINGS = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.0": {"temperature": 1.0},
    "temperature 1.5": {"temperature": 1.5},
    "top_p 0.8": {"top_p": 0.8},
    "top_k 5": {"top_k": 5},
    "min_p 0.1": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.8},
}
# Small graphs of a fixed size, so that tokens at every depth are sampled both on the graph and beyond it.
GSD = {"num_speculative_tokens": 6, "max_depth": 3, "top_k": 3, "budget": 6}
# An engine's unseeded requests share one generator. With the same seed, both engines would draw the same numbers.
SEEDS = {"plain": 11, "gsd": 12}
OPTIONS = {"max_model_len": 64, "max_num_seqs": 256, "skip_tokenizer_init": True}
DEALS = 2000


@dataclass(frozen=True)
class Comparison:
    """The distance of two samples, the distances that chance produces, and how often chance reaches as much."""

    distance: float
    noise_mean: float  # over deals of the pooled samples
    noise_999: float  # 99.9 % of them are below
    p_value: float

    @property
    def is_noise(self) -> bool:
        """Whether the samples are no further apart than two samples of one distribution."""
        return self.distance <= self.noise_999


def sample(engine: Engine, keys: dict, count: int) -> Counter:
    """Count each text of ``LENGTH`` tokens among ``count`` unseeded continuations of one prompt."""
    params = {"temperature": 1.0, **keys, "max_tokens": LENGTH, "ignore_eos": True, "n": min(count, 1000)}
    texts: Counter = Counter()
    while (left := count - texts.total()) > 0:
        params["n"] = min(params["n"], left)
        for answer in engine.generate([PROMPT], params):
            texts.update(tuple(one.tokens) for one in answer.completions)
    assert all(len(text) == LENGTH for text in texts)
    return texts


def compare(left: Counter, right: Counter) -> Comparison:
    """Permutation test of the total-variation distance between two samples."""
    texts = list(left.keys() | right.keys())
    ours, theirs = (np.array([counts[text] for text in texts]) for counts in (left, right))
    sizes = ours.sum(), theirs.sum()

    def distance_of(first, second):
        return np.abs(first / sizes[0] - second / sizes[1]).sum(-1) / 2

    distance = float(distance_of(ours, theirs))
    random, pool, noise = np.random.default_rng(0), ours + theirs, np.empty(0)
    while len(noise) < DEALS:
        deals = random.multivariate_hypergeometric(pool, sizes[0], size=100)
        noise = np.append(noise, distance_of(deals, pool - deals))
    p_value = (1 + int((noise >= distance).sum())) / (1 + DEALS)
    return Comparison(distance, float(noise.mean()), float(np.quantile(noise, 0.999)), p_value)


def starts(texts: Counter, length: int) -> Counter:
    """Count the texts by their first ``length`` tokens."""
    result: Counter = Counter()
    for text, count in texts.items():
        result[text[:length]] += count
    return result


def compare_starts(left: Counter, right: Counter) -> dict[str, dict]:
    """``compare`` the texts' first 1, 2, ... tokens. Shorter beginnings have less noise."""
    compared = {}
    for length in range(1, LENGTH + 1):
        one = compare(starts(left, length), starts(right, length))
        compared[f"first {length}"] = {**asdict(one), "is_noise": one.is_noise}
    return compared


def compare_plain(plain: Engine, keys: dict, count: int) -> dict[str, dict]:
    """Compare two samples of plain vLLM."""
    return compare_starts(sample(plain, keys, count), sample(plain, keys, count))


def check(plain: Engine, gsd: Engine, keys: dict, count: int) -> dict:
    """Report on one setting: plain against the graph, and the graph's counters."""
    reference = sample(plain, keys, count)
    before = gsd.metrics()
    graph = sample(gsd, keys, count)
    counts = {name: value - before.get(name, 0) for name, value in gsd.metrics().items() if isinstance(value, int)}
    apart = compare_starts(reference, graph)
    return {
        "samples": graph.total(),
        "texts": len(reference.keys() | graph.keys()),
        "tokens_per_step": graph.total() * LENGTH / counts["gsd_target_steps"],
        "accepted": counts["spec_decode_num_accepted_tokens"],
        "fallbacks": sum(value for name, value in counts.items() if name.startswith("gsd_fallbacks")),
        "plain_graph": apart,
        "within_noise": all(one["is_noise"] for one in apart.values()),
    }
