"""The computations of ``vllm-gsd bench``, without engines."""

import random
from types import SimpleNamespace

import pytest

from vllm_gsd.tools.bench import contexts, forms
from vllm_gsd.tools.bench.bounds import mean_with_bounds
from vllm_gsd.tools.bench.methods import BenchError, Drafts, Setting, settings_of
from vllm_gsd.tools.prompt_file import Request

PLAIN, GRAPH = (Setting(name, "", None, False) for name in ("plain", "gsd"))


def engines(requests, answer, max_tokens=9, repeats=3):
    """Fake engines that answer a job with ``answer(setting, job)``."""
    work = SimpleNamespace(requests=requests, max_tokens=max_tokens, repeats=repeats)
    return SimpleNamespace(work=work, run=answer)


def requests(count, categories=("a", "b")):
    return [Request([{"role": "user", "content": str(i)}], categories[i % len(categories)]) for i in range(count)]


def test_bounds_hold_the_mean_and_shrink_with_more_values():
    draw = random.Random(0)
    values = [draw.lognormvariate(0.1, 0.2) for _ in range(400)]
    few, many = mean_with_bounds(values[:10]), mean_with_bounds(values)
    for one in (few, many):
        assert one["low"] < one["mean"] < one["high"]
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 3
    assert many["low"] < 1.105 < many["high"]
    assert mean_with_bounds([4.0]) == {"mean": pytest.approx(4), "low": None, "high": None}
    assert mean_with_bounds([2.0, 0.5, 1.0]) == {"mean": pytest.approx(1), "low": None, "high": None}


def test_a_longer_context_ends_in_the_shorter_one():
    ids, others = [1, 2, 3], [[4, 5], [6]]
    assert contexts.with_context(ids, others, 2) == [2, 3]
    assert contexts.with_context(ids, others, 3) == ids
    assert contexts.with_context(ids, others, 10) == [4, 5, 6, 4, 5, 6, 4, 1, 2, 3]


def test_growth_is_of_the_median_step():
    slow = iter([5.0, 1.0, 1.0] * 100)

    def answer(setting, job):
        ms = (10 if setting is PLAIN else 12) * (1.2 if job["context"] == 40 else 1.0)
        if setting is GRAPH and job["context"] == 4 and job["chats"][0][0]["content"] == "0":
            ms *= next(slow)  # one turn of three
        tokens = 1 if setting is PLAIN else 2
        return {"decode": {"seconds": 4 * ms / 1e3, "steps": 4}, "requests": [{"tokens": 1 + 4 * tokens}]}

    ticks = []
    report = contexts.measure({"plain": PLAIN, "gsd": GRAPH}, engines(requests(3), answer), [4, 40], ticks.append)
    assert len(ticks) == 3 * 2 * 2
    for method, ms in (("plain", 10), ("gsd", 12)):
        assert report[method]["growth"]["mean"] == pytest.approx(1.2)
        assert report[method]["step_ms"] == {"4": pytest.approx(ms), "40": pytest.approx(1.2 * ms)}
    assert report["gsd"]["tokens_per_step"] == {"4": 2, "40": 2}


@pytest.mark.parametrize(("count", "max_tokens"), [(1, 9), (3, 1)])
def test_contexts_need_text_and_steps(count, max_tokens):
    with pytest.raises(BenchError, match="--contexts needs two prompts"):
        contexts.measure({"plain": PLAIN}, engines(requests(count), None, max_tokens), [4, 40], print)


def test_forms_are_compared_prompt_by_prompt():
    """The first turn warms up, and one slow turn of three does not count."""
    seen = []

    def answer(setting, job):
        assert setting is GRAPH
        seen.append((job["chats"][0][0]["content"], job["form"]))
        seconds = {"gsd": 1.0, "gsd-tree": 1.1, "gsd-chain": 2.0}[job["form"]]
        if seen.count(seen[-1]) <= 2:
            seconds *= 7
        return {"requests": [{"tokens": 8}], "seconds": seconds}

    report = forms.measure(GRAPH, engines(requests(4), answer), lambda _: None)
    assert len(seen) == 4 * 3 * (3 + 1)
    assert {category: rows["prompts"] for category, rows in report.items()} == {"": 4, "a": 2, "b": 2}
    for rows in report.values():
        assert rows["gsd-tree"]["mean"] == pytest.approx(1.1)
        assert rows["gsd-chain"]["mean"] == pytest.approx(2)


def test_all_our_methods_have_the_kernels_that_were_asked_for():
    off, graph, tree = (
        settings_of(name, drafts=Drafts.of(None), gsd={"cpu_kernels": "off"}, lengths=[1], modes=["eager"])[0]
        for name in ("gsd-off", "gsd", "gsd-tree")
    )
    assert off.engine == graph  # so that their difference is the graph
    assert off.speculative["cpu_kernels"] == tree.speculative["cpu_kernels"] == "off"
