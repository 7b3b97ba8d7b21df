"""The soak test's checks find each fault of answers and servers, and report no others."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from soaking.answers import Answer, Choice, faults
from soaking.load_server import Outcome, Soak
from soaking.loads import KINDS, WEATHER, Load, draw_load, kinds
from soaking.report import make_report
from soaking.verdicts import judge

EOS = 2
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}}
JSON = '{"city": "Rome", "days": 1, "hourly": true}'


def load(**body) -> Load:
    return Load("plain", "answered", False, {"max_tokens": 4, "prompt": "", **body}, 0.5)


def answer(*choices: Choice, tokens: int | None = None) -> Answer:
    counted = sum(len(choice.tokens) for choice in choices) if tokens is None else tokens
    return Answer(dict(enumerate(choices)), tokens=counted)


def choice(text="abcd", tokens=(5, 6, 7, 8), logprobs=(), reason="length") -> Choice:
    return Choice(text, list(tokens), list(logprobs), reason)


GOOD = {
    "length": (load(), answer(choice())),
    "end of text": (load(), answer(choice("a", (5, EOS), reason="stop"))),
    "end of text ignored": (load(ignore_eos=True), answer(choice(tokens=(5, EOS, 6, 7)))),
    "stop left out": (load(stop=["e"]), answer(choice("abc", reason="stop"))),
    "stop included": (load(stop=["cd"], include_stop_str_in_output=True), answer(choice(reason="stop"))),
    "JSON": (load(**SCHEMA), answer(choice(JSON, reason="stop"))),
    "JSON cut": (load(**SCHEMA), answer(choice(JSON[:9]))),
    "two": (load(n=2), answer(choice(), choice())),
    "logprobs": (load(logprobs=1), answer(choice(logprobs=[-1.0, 0.0, -2.0, -3.0]))),
    "echo": (load(logprobs=1, echo=True), answer(choice(logprobs=[None, -1.0, 0.0, -2.0, -3.0]))),
}
BAD = {
    "too many tokens": (load(), answer(choice(tokens=range(5, 10))), "5 tokens, but max_tokens is 4"),
    "miscounted": (load(), answer(choice(), tokens=3), "counts 3 tokens"),
    "too few tokens": (load(min_tokens=3), answer(choice(tokens=(5, 6), reason="stop")), "min_tokens is 3"),
    "cut too early": (load(), answer(choice(tokens=(5, 6))), "finish_reason is length after 2 tokens"),
    "no end": (load(), answer(choice(reason=None)), "finish_reason is None"),
    "after the end": (load(), answer(choice(tokens=(5, EOS, 6), reason="stop")), "go on after one of [2]"),
    "after a stop token": (load(stop_token_ids=[6]), answer(choice()), "go on after"),
    "after a stop": (load(stop=["b"]), answer(choice(reason="stop")), "goes on after the stop 'b'"),
    "after an included stop": (
        load(stop=["b"], include_stop_str_in_output=True),
        answer(choice(reason="stop")),
        "goes on after the stop 'b'",
    ),
    "not JSON": (load(**SCHEMA), answer(choice(JSON[:9], reason="stop")), "is not of the schema"),
    "other JSON": (load(**SCHEMA), answer(choice('{"city": "Rome"}', reason="stop")), "is not of the schema"),
    "no choice": (load(structured_outputs={"choice": ["a"]}), answer(choice("b", reason="stop")), "is not of"),
    "no match": (load(structured_outputs={"regex": "a+"}), answer(choice("aab", reason="stop")), "is not of"),
    "forbidden token": (load(allowed_token_ids=[5, 6, 7]), answer(choice()), "allowed_token_ids"),
    "one of two": (load(n=2), answer(choice()), "n = 2"),
    "logprob missing": (load(logprobs=1), answer(choice(logprobs=[-1.0])), "1 logprobs of 4 tokens"),
    "logprob not finite": (load(logprobs=1), answer(choice(logprobs=[-1.0, float("nan"), -1, -1])), "finite"),
    "logprob above 0": (load(logprobs=1), answer(choice(logprobs=[-1.0, 1.0, -1, -1])), "finite"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_answers(name):
    assert faults(*GOOD[name], {EOS}) == []


@pytest.mark.parametrize("name", BAD)
def test_faults_are_found(name):
    request, response, words = BAD[name]
    assert any(words in fault for fault in faults(request, response, {EOS}))


METRICS = {"vllm:num_preemptions_total": 3.0, "vllm:spec_decode_num_accepted_tokens_total": 9.0}
GROWS = "memory does not grow in the second half"


def readings(mib, seconds=1800, requests=6000) -> list[dict]:
    """180 memory readings: ``mib`` is a function of the number of requests; about 1 MiB of noise is added."""
    noise, done = np.random.default_rng(0), np.linspace(0, requests, 180)
    return [
        {"seconds": seconds * share, "requests": int(count), "mib": mib(count) + noise.normal()}
        for share, count in zip(np.linspace(0, 1, 180), done, strict=True)
    ]


STEADY = readings(lambda done: 500.0)


def outcomes(**changes) -> list[Outcome]:
    good = [Outcome(Load(kind, "answered", True, {}, 0.5), "answered", 1.0, answer(choice())) for kind in KINDS]
    return [*good, Outcome(load(), changes.get("ended", "answered"), 1.0, None, changes.get("faults", []))]


def broken(series=STEADY, metrics=METRICS, busy=None, lost=None, **changes) -> list[str]:
    verdicts = judge(outcomes(**changes), series, metrics, busy or {}, lost, lora=True)
    report = make_report({}, outcomes(**changes), series, metrics, verdicts)
    assert report["passed"] == all(verdict.held is not False for verdict in verdicts)
    return [verdict.check for verdict in verdicts if verdict.held is False]


def test_everything_held():
    assert broken() == []


@pytest.mark.parametrize(
    ("found", "check"),
    [
        ({"ended": "server error"}, "no server errors"),
        ({"lost": "no metrics"}, "the server ran to the end"),
        ({"ended": "refused"}, "no refusals"),
        ({"ended": "hung"}, "no hangs"),
        ({"faults": ["a token too many"]}, "answers keep to their requests"),
        ({"busy": {"vllm:kv_cache_usage_perc": 0.1}}, "all KV blocks free"),
        ({"busy": {"vllm:gsd_tracked_requests": 1.0}}, "tables by request empty"),
        ({"busy": {"vllm:gsd_tracked_requests": None}}, "tables by request empty"),
        ({"busy": {"vllm:num_requests_running": 1.0}}, "no request left"),
        ({"series": readings(lambda done: 500 + 4 * done / 1024)}, GROWS),
        ({"metrics": {**METRICS, "vllm:num_preemptions_total": 0.0}}, "some requests were preempted"),
        ({"metrics": {"vllm:num_preemptions_total": 1.0}}, "drafts were accepted"),
    ],
)
def test_each_verdict(found, check):
    assert broken(**found) == [check]


@pytest.mark.parametrize("requests", [3000, 6000, 20000])
@pytest.mark.parametrize("kib", [4, 40])
def test_leaks(kib, requests):
    assert broken(series=readings(lambda done: 500 + kib * done / 1024, requests=requests)) == [GROWS]
    # A cache that shrinks at the same time does not hide the leak.
    both = readings(lambda done: 900 - 300 * np.exp(-8 * done / requests) + kib * done / 1024, requests=requests)
    assert broken(series=both) == [GROWS]


@pytest.mark.parametrize(
    "mib",
    [
        pytest.param(lambda done: 900 - 400 * np.exp(-done / 600), id="a cache fills"),
        pytest.param(lambda done: 500 + 10 * min(done, 4000) / 1024, id="a cache is full after two thirds"),
        pytest.param(lambda done: 500 + 30 * (done > 4000), id="a buffer grows in the third quarter"),
        pytest.param(lambda done: 500 + 30 * (done > 5500), id="a buffer grows at the end"),
        pytest.param(lambda done: 500 + 10 * np.sin(done / 150), id="memory comes and goes"),
        pytest.param(lambda done: 500 - done / 100, id="memory shrinks"),
    ],
)
def test_no_leaks(mib):
    assert broken(series=readings(mib)) == []


def test_few_requests_show_only_large_leaks():
    assert broken(series=readings(lambda done: 500 + 4 * done / 1024, 600, 200)) == []
    assert broken(series=readings(lambda done: 500 + 200 * done / 1024, 600, 200)) == [GROWS]


def test_short_soaks_do_not_judge_memory():
    assert broken(series=readings(lambda done: 100 + done, seconds=30)) == []


def test_slow_is_no_hang():
    soak = Soak("", 0, 60, 32, patience=180, longest=96, words=64, seed=0, adapters=[], ends=set())
    assert soak._patience() == 180
    soak.usual = 20.0
    assert soak._patience() == 600


def test_loads_are_drawn_alike_and_of_all_kinds():
    drawn = [draw_load(1, number, "target", ["one"], 16) for number in range(1, 400)]
    assert drawn == [draw_load(1, number, "target", ["one"], 16) for number in range(1, 400)]
    first = drawn[: len(kinds(lora=True))]
    assert {one.kind for one in first if one.fate == "answered"} == set(kinds(lora=True))
    assert {one.kind for one in drawn} == set(kinds(lora=True))
    assert {one.fate for one in drawn} == {"answered", "aborted", "vanished"}
    assert "LoRA" not in kinds(lora=False) and set(kinds(lora=False)) | set(kinds(lora=True)) == set(KINDS)
