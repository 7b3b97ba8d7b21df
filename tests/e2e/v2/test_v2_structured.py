"""Grammars along graphs on Model Runner V2, also with a scheduler that is a step ahead of what is drafted."""

import re

import pytest
from engine_process import Engine, model_runner
from v2_engine import V2Engine

from vllm_gsd.tools.inspect.summary import summarise
from vllm_gsd.tools.inspect.trace import read_traces

DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CHOICE = ["certainly yes", "certainly not", "maybe"]
TRACED = {"extra_args": {"gsd_trace": True}}
REPEATED = "(abc){5}"  # n-grams guess it
PARAMS = [
    {"temperature": 0, "max_tokens": 14, "structured_outputs": {"regex": DATE}},
    {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": CHOICE}},
    {"temperature": 0, "max_tokens": 16, "structured_outputs": {"regex": REPEATED}},
    {"temperature": 0, "max_tokens": 14, "presence_penalty": 0.4, "structured_outputs": {"regex": DATE}},
]
FREE = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
GSD = {"method": "gsd", "num_speculative_tokens": 8, "max_depth": 3, "top_k": 8, "theta_prob": 0.0, "theta_sib": 0.0}


@pytest.fixture(scope="module")
def requests(text_pair, random_prompts, v2_options):
    """Prompts, and what plain vLLM answers them with on V1, which is much faster here."""
    prompts = random_prompts(len(PARAMS), 5, 20, seed=5)
    engine = Engine(text_pair.target, None, **{**v2_options, "skip_tokenizer_init": False})
    answers, (free,) = engine.generate(prompts, PARAMS), engine.generate(prompts[:1], FREE)
    engine.close()
    return prompts, answers, free


def note_who_grows(llm) -> None:
    """Note in every step how many graphs the device grows, and how many the host."""
    speculator = model_runner(llm).speculator
    speculator.grown = []

    def noted(grow, kind):
        def grows(batch, places):
            speculator.grown.append((kind, len(places), batch.num_reqs))
            grow(batch, places)

        return grows

    speculator._grow_on_device = noted(speculator._grow_on_device, "device")
    speculator._grow_on_host = noted(speculator._grow_on_host, "host")


def who_grew(llm) -> list[tuple[str, int, int]]:
    return model_runner(llm).speculator.grown


@pytest.mark.parametrize(
    ("async_scheduling", "head"), [(True, None), (False, None), (True, "qwen3")], ids=["async", "sync", "eagle3"]
)
def test_valid_and_equal(text_pair, tiny_eagle3, requests, async_scheduling, head, tmp_path):
    """And their steps are recorded as they ask for it, as are those of a request without a grammar."""
    prompts, expected, expected_free = requests
    trace = tmp_path / "trace.jsonl"
    config = {**GSD, "model": str(tiny_eagle3 / head if head else text_pair.draft), "trace": str(trace)}
    engine = V2Engine(text_pair.target, config, async_scheduling=async_scheduling, skip_tokenizer_init=False)
    answers = engine.generate(prompts, [{**params, **TRACED} for params in PARAMS])
    counts = engine.metrics()
    (free,) = engine.generate(prompts[:1], {"temperature": 0, "max_tokens": 8, **TRACED})
    engine.call(note_who_grows)
    mixed = engine.generate([prompts[0], *prompts], [FREE, *PARAMS])
    grown = engine.call(who_grew)
    engine.close()
    assert [answer.tokens for answer in mixed] == [answer.tokens for answer in [expected_free, *expected]]
    # The request without a grammar drafts on the device, also beside those that wait for the host.
    assert {count for kind, count, _ in grown if kind == "device"} == {1}
    assert any(kind == "device" and batch == 4 for kind, _, batch in grown)
    assert any(kind == "host" and batch == 4 and count == 3 for kind, count, batch in grown)
    traced = [
        [text for step in trace.steps for text in step["tokens"]["text"]] for trace in read_traces(trace).values()
    ]
    texts = sorted(answer.completions[0].text for answer in [*answers, free])
    assert sorted("".join(text).removesuffix("<eos>") for text in traced) == texts
    assert summarise(list(read_traces(trace).values())[-1].steps)["rows"] > 0
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    texts = [answer.completions[0].text for answer in answers]
    assert re.fullmatch(DATE, texts[0]) and texts[1] in CHOICE and re.fullmatch(DATE, texts[3])
    assert texts[2] == 5 * "abc"
    assert counts["gsd_nodes_invalid"] > 0
    assert counts["spec_decode_num_accepted_tokens"] > 5
    assert not any(name.startswith("gsd_fallbacks") for name in counts)
