"""Grammars on graphs with Model Runner V2, also with asynchronous scheduling, which is a step ahead of the drafts."""

import json
import os
import re
import sys

import pytest
from engine_process import Engine, draft_every_level, model_runner
from planted import plant_costs
from v2_engine import V2Engine
from vllm.v1.structured_output import StructuredOutputManager

from vllm_gsd.tools.inspect.summary import summarise
from vllm_gsd.tools.inspect.trace import read_traces

DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CHOICE = ["certainly yes", "certainly not", "maybe"]
TRACED = {"extra_args": {"gsd_trace": True}}
REPEATED = "(abc){5}"  # n-grams predict it
RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"enum": [1815, 1906]}, "alive": {"type": "boolean"}},
    "required": ["name", "born", "alive"],
    "additionalProperties": False,
}
PARAMS = [
    {"temperature": 0, "max_tokens": 14, "structured_outputs": {"regex": DATE}},
    {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": CHOICE}},
    {"temperature": 0, "max_tokens": 16, "structured_outputs": {"regex": REPEATED}},
    {"temperature": 0, "max_tokens": 14, "presence_penalty": 0.4, "structured_outputs": {"regex": DATE}},
    {"temperature": 0, "max_tokens": 60, "structured_outputs": {"json": RECORD}},
]
VALID = [
    re.compile(DATE).fullmatch,
    CHOICE.__contains__,
    (5 * "abc").__eq__,
    re.compile(DATE).fullmatch,
    lambda text: json.loads(text).keys() == RECORD["properties"].keys(),
]
COUNT = int(os.environ.get("GSD_TEST_REQUESTS", len(PARAMS)))  # 100 take minutes
FREE = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
OPTIONS = {
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
GSD = {"method": "gsd", "num_speculative_tokens": 8, "max_depth": 3, "top_k": 8, "theta_prob": 0.0, "theta_sib": 0.0}


@pytest.fixture(scope="module")
def requests(text_pair, random_prompts, v2_options):
    """Prompts, parameters, plain vLLM's answers on V1, which is much faster here, and V1's target steps with gsd.

    The last ones are answers to prompts of which three do not fit into one step of V2's engines.
    """
    prompts, params = random_prompts(COUNT, 5, 20, seed=5), [PARAMS[index % len(PARAMS)] for index in range(COUNT)]
    options = {**v2_options, **OPTIONS}
    plain = Engine(text_pair.target, None, **options)
    answers, (free,) = plain.generate(prompts, params), plain.generate(prompts[:1], FREE)
    parts = plain.generate(random_prompts(3, 120, 130, seed=9), PARAMS[0])
    plain.close()
    own = {**GSD, "model": str(text_pair.draft)}
    engine = Engine(text_pair.target, own, [draft_every_level, wait_for_grammars], **options)
    engine.generate([prompts[0], *prompts], [FREE, *params])
    steps = engine.metrics()["gsd_target_steps"]
    engine.close()
    return prompts, params, answers, free, steps, parts


def wait_for_grammars(llm) -> None:
    """Compile grammars at once, for the scheduler and on V2 for the worker, which adds no nodes before it has them.

    How soon they are ready, and so the numbers of steps, would depend on how busy the machine is.
    """
    upstream = StructuredOutputManager.grammar_init

    def at_once(manager, request):
        manager._use_async_grammar_compilation = False
        upstream(manager, request)

    StructuredOutputManager.grammar_init = at_once


def note_who_grows(llm) -> None:
    """Record how many graphs the device and the host grow in every step."""
    speculator = model_runner(llm).speculator
    speculator.grown = []

    def noted(grow, kind):
        def grows(*args):
            batch, places = args[1:3] if kind == "host" else args[:2]
            speculator.grown.append((kind, len(places), batch.num_reqs))
            grow(*args)

        return grows

    speculator._grow_on_device = noted(speculator._grow_on_device, "device")
    module = sys.modules[type(speculator).__module__]
    module.grow_on_host = noted(module.grow_on_host, "host")


def who_grew(llm) -> list[tuple[str, int, int]]:
    return model_runner(llm).speculator.grown


def planned_anew(engine, prompts, params) -> tuple[list, int]:
    """The answers when rows have a cost, and how many nodes the plans then left out."""
    before = engine.metrics()
    engine.call(plant_costs, 0.6)
    answers = engine.generate(prompts, params)
    after = engine.metrics()
    assert after["gsd_nodes_verified"] > before["gsd_nodes_verified"]
    return answers, after["gsd_nodes_cut"] - before.get("gsd_nodes_cut", 0)


@pytest.mark.parametrize(
    ("async_scheduling", "head"), [(True, None), (False, None), (True, "qwen3")], ids=["async", "sync", "eagle3"]
)
def test_valid_and_equal(text_pair, tiny_eagle3, random_prompts, requests, async_scheduling, head, tmp_path):
    """Requests with grammars share batches with one without. Traces work with and without a grammar."""
    prompts, params, expected, expected_free, v1_steps, expected_parts = requests
    trace = tmp_path / "trace.jsonl"
    config = {**GSD, "model": str(tiny_eagle3 / head if head else text_pair.draft), "trace": str(trace)}
    engine = V2Engine(text_pair.target, config, async_scheduling=async_scheduling, **OPTIONS)
    engine.call(note_who_grows)
    engine.call(wait_for_grammars)
    without_grammar, *answers = engine.generate(
        [prompts[0], *prompts], [FREE, *({**keys, **TRACED} for keys in params)]
    )
    grown = engine.call(who_grew)
    counts = engine.metrics()
    (free,) = engine.generate(prompts[:1], {"temperature": 0, "max_tokens": 8, **TRACED})
    parts = engine.generate(random_prompts(3, 120, 130, seed=9), PARAMS[0])
    stop, whole = expected_free.completions[0].text[12:15], expected_free.completions[0].text
    (stopped,) = engine.generate(prompts[:1], {**FREE, "stop": [stop]})
    few, cut = len(PARAMS), 1
    planned = answers[:few]
    if async_scheduling and head is None:
        planned, cut = planned_anew(engine, prompts[:few], params[:few])
    engine.close()
    assert [answer.tokens for answer in planned] == [answer.tokens for answer in expected[:few]] and cut > 0
    assert stopped.completions[0].text == whole[: whole.index(stop)] and stopped.completions[0].stop_reason == stop
    assert without_grammar.tokens == expected_free.tokens
    assert [answer.tokens for answer in parts] == [answer.tokens for answer in expected_parts]
    # The request without a grammar drafts on the device, also in batches with requests that wait for the host.
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
    for index, answer in enumerate(answers):
        assert VALID[index % len(PARAMS)](answer.completions[0].text)
    # On both runners, grammars remove nodes and add others, so that V2 accepts as many as V1.
    assert counts["gsd_nodes_accepted_grammar"] > 0
    if head is None:
        assert counts["gsd_target_steps"] <= 1.1 * v1_steps
    assert counts["spec_decode_num_accepted_tokens"] > 5
    assert not any(name.startswith("gsd_fallbacks") for name in counts)
