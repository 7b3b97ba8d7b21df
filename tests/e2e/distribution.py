"""Is what the graph samples distributed as what plain vLLM samples? Settings, samples and the statistics.

A two-sample permutation test: if both engines draw from one distribution, then which of them drew a text is a matter
of chance. So both samples are pooled and dealt out again at random, and the total-variation distance between the two
is compared with that of the deals. Two runs of plain vLLM are judged in the same way, to show what noise there is.
"""

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
from engine_process import Engine

VOCAB_SIZE = 32
PROMPT = [5, 9, 3, 17, 9, 3]
LENGTH = 4
# Sampling parameters by name. Penalties are large, and texts short, so that a path that is not counted is noticed.
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
# Always the same small graphs: every depth is sampled on the graph, and beyond it.
GSD = {"num_speculative_tokens": 6, "max_depth": 3, "top_k": 3, "budget": 6}
# Engines draw unseeded requests from one generator: with one seed for all, they would draw alike.
SEEDS = {"plain": 11, "gsd": 12}
OPTIONS = {"max_model_len": 64, "max_num_seqs": 256, "skip_tokenizer_init": True}
DEALS = 2000


@dataclass(frozen=True)
class Comparison:
    """Two samples: their distance, what chance does, and how often chance does as much."""

    distance: float
    noise_mean: float  # over deals of the pooled samples
    noise_999: float  # 99.9 % of them are below
    p_value: float

    @property
    def is_noise(self) -> bool:
        """Whether the samples are no further apart than two samples of one distribution."""
        return self.distance <= self.noise_999


def sample(engine: Engine, keys: dict, count: int) -> Counter:
    """How often each text of ``LENGTH`` tokens came, in ``count`` unseeded continuations of one prompt."""
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
    """How often each beginning of that length came."""
    result: Counter = Counter()
    for text, count in texts.items():
        result[text[:length]] += count
    return result


def compare_starts(left: Counter, right: Counter) -> dict[int, Comparison]:
    """``compare`` of the texts' first 1, 2, ... tokens: the shorter, the less noise."""
    return {length: compare(starts(left, length), starts(right, length)) for length in range(1, LENGTH + 1)}


def check(plain: Engine, gsd: Engine, keys: dict, count: int) -> dict:
    """Report on one setting: plain against plain, plain against the graph, and what the graph did."""
    reference, again = sample(plain, keys, count), sample(plain, keys, count)
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
        "plain_plain": {f"first {length}": asdict(one) for length, one in compare_starts(reference, again).items()},
        "plain_graph": {f"first {length}": asdict(one) for length, one in apart.items()},
        "within_noise": all(one.is_noise for one in apart.values()),
    }
