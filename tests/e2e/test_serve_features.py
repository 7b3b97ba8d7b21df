"""Features of the HTTP API, such as tools and reasoning: answers with graphs equal those of plain ``vllm serve``."""

import contextlib
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from patience import SECONDS
from serve_process import VLLM, serving
from text_pair import FIRST

from vllm_gsd.tools.inspect.summary import summarise
from vllm_gsd.tools.inspect.trace import read_traces

CITIES = ["Rome", "Oslo", "Paris"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"enum": [1, 2, 3]}, "hourly": {"type": "boolean"}},
    "required": ["city", "days", "hourly"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}


def tools(strict: bool) -> list[dict]:
    """The two tools. With strict tools, vLLM replaces the request's grammar with one made from the tools' schemas."""
    functions = ({"name": name, "parameters": schema, "strict": strict} for name, schema in SCHEMAS.items())
    return [{"type": "function", "function": function} for function in functions]


# A random model would write endless spaces wherever the grammar allows them.
CALLING = {"tools": tools(strict=True), "logit_bias": {str(FIRST.index(" ")): -100.0, str(FIRST.index("\n")): -100.0}}
REQUIRED = {**CALLING, "tool_choice": "required"}
NAMED = {**CALLING, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
# A random model would not call a tool by itself, so a grammar makes it.
CALL = r'(hm|well) <tool_call>\n\{"name": "get_time", "arguments": \{"zone": "(UTC|CET)"\}\}\n</tool_call>'
AUTO = {"tools": tools(strict=False), "tool_choice": "auto", "structured_outputs": {"regex": CALL}}
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}}
SEEDED = {"temperature": 1.0, "seed": 4}
# The bias ends reasoning early, often in the middle of a graph.
THINK = {"chat_template_kwargs": {"thinking": True}, "logit_bias": {str(FIRST.index("</think>")): 9.0}}
CHATS = {
    "chat": {},
    "sampled": {**SEEDED, "min_p": 0.05},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "several": {**SEEDED, "n": 3},
    "stop": {"stop": ["1", " w40"]},
    "json": AS_JSON,
    "tool named": NAMED,
    "tool required": REQUIRED,
    "tool auto": AUTO,
    "thoughts": THINK,
    "thoughts and json": {**THINK, **AS_JSON},
    "several thoughts and json": {**THINK, **AS_JSON, **SEEDED, "n": 5},
    "thoughts and tool named": {**NAMED, **THINK, "logit_bias": {**CALLING["logit_bias"], **THINK["logit_bias"]}},
    "thoughts and tool auto": {**THINK, **AUTO},
}
COMPLETIONS = {
    "completion": {},
    "echo": {"echo": True, "logprobs": 2},
    "completion logprobs": {**SEEDED, "logprobs": 3, "n": 2},
    "prompt logprobs": {"prompt_logprobs": 2},
    "completion stop": {"stop": ["2", " w3"], "include_stop_str_in_output": True},
    "choice": {"structured_outputs": {"choice": ["yes, always", "yes, sometimes", "never"]}},
    "several prompts": {**SEEDED, "prompt": ["one, two", "three, four, five"], "n": 2},
    "eos ignored": {"ignore_eos": True},
}
TRACED = {"vllm_xargs": {"gsd_trace": True}}
COMMON = {"model": "target", "temperature": 0, "max_tokens": 110}
MESSAGES = {"messages": [{"role": "user", "content": "How is the weather?"}]}
# Name: the endpoint and the request's keys.
REQUESTS = {
    **{name: ("chat/completions", {**COMMON, **MESSAGES, **keys}) for name, keys in CHATS.items()},
    **{name: ("completions", {**COMMON, "prompt": "once upon a time", **keys}) for name, keys in COMPLETIONS.items()},
}


# Names, and whether the answer is streamed. vLLM does not stream prompt logprobs.
CASES = [(name, stream) for name in REQUESTS for stream in (False, True) if name != "prompt logprobs" or not stream]


@pytest.fixture(scope="module")
def servers(text_pair, preforked, tmp_path_factory):
    """A server of plain vLLM and one with gsd, started in parallel."""
    folder = tmp_path_factory.mktemp("serve_features")
    config = {"method": "gsd", "model": str(text_pair.draft), "budget": 16, "trace": str(folder / "trace.jsonl")}
    (folder / "gsd.json").write_text(json.dumps(config))
    options = {
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_v3",
        "structured_outputs_config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 1 << 27,
        "command": (preforked, VLLM),
    }
    with contextlib.ExitStack() as stack:
        started = []
        for name, ours in (("plain", {}), ("gsd", {"speculative_config": folder / "gsd.json"})):
            (folder / name).mkdir()
            started.append(
                stack.enter_context(
                    serving(text_pair.target, folder / name, "--enable-auto-tool-choice", **options, **ours)
                )
            )
        for server in started:
            server.wait()
        yield started


def post(server, endpoint: str, keys: dict) -> list[dict]:
    """Send a request and return the answer as a list: one item, or all chunks if it is streamed."""
    body = json.dumps(keys).encode()
    request = urllib.request.Request(f"{server.url}/v1/{endpoint}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            if not keys.get("stream"):
                return [json.load(answer)]
            lines = [line.decode().removeprefix("data: ").strip() for line in answer]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{keys}: {error.read().decode()}") from error
    assert lines[-2] == "[DONE]"
    return [json.loads(line) for line in lines[:-2] if line]


def choices(answer: list[dict]) -> list[dict]:
    """An answer's choices without random ids. Chunks of a stream are joined."""
    joined: dict[int, dict] = {}
    for piece in answer:
        for choice in piece["choices"]:
            _join(joined.setdefault(choice["index"], {}), choice)
    return [joined[index] for index in sorted(joined)]


def _join(whole: dict, piece: dict) -> None:
    for key, value in piece.items():
        if value is None or value == [] or key in ("index", "id", "role", "type"):
            continue
        key = "message" if key == "delta" else key
        if isinstance(value, dict):
            _join(whole.setdefault(key, {}), value)
        elif key == "tool_calls":
            calls = whole.setdefault(key, [])
            for place, call in enumerate(value):
                place = call.get("index", place)
                calls.extend({} for _ in range(place + 1 - len(calls)))
                _join(calls[place], call)
        elif isinstance(value, (str, list)) and key not in ("finish_reason", "stop_reason"):
            whole[key] = whole[key] + value if key in whole else value
        else:
            whole[key] = value


def assert_same(ours, theirs):
    """Check that two JSON values are equal up to the rounding of floats."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-3)
    else:
        assert ours == theirs


@pytest.fixture(scope="module")
def answers(servers):
    """Answers of both servers by (name, whether streamed). Each server gets all requests at once."""

    def ask(server):
        with ThreadPoolExecutor(len(CASES)) as pool:
            futures = {
                (name, stream): pool.submit(post, server, REQUESTS[name][0], {**REQUESTS[name][1], "stream": stream})
                for name, stream in CASES
            }
            return {case: choices(future.result()) for case, future in futures.items()}

    return [ask(server) for server in servers]


@pytest.mark.parametrize(("name", "stream"), CASES)
def test_same_answer(answers, name, stream):
    theirs, ours = answers
    assert_same(ours[name, stream], theirs[name, stream])


@pytest.mark.parametrize("name", ["logprobs", "tool named", "thoughts and json", "echo"])
def test_one_request_at_a_time(servers, answers, name):
    endpoint, keys = REQUESTS[name]
    assert_same(choices(post(servers[1], endpoint, {**keys, "stream": True})), answers[0][name, True])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [name for name in CHATS if "tool" in name])
def test_tools_are_called(answers, name, stream):
    (choice,) = answers[1][name, stream]
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert bool(choice["message"].get("reasoning")) == ("thoughts" in name)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_json_after_thoughts(answers, stream):
    thoughts = set()
    for choice in answers[1]["thoughts and json", stream] + answers[1]["several thoughts and json", stream]:
        jsonschema.validate(json.loads(choice["message"]["content"]), WEATHER)
        thoughts.add(choice["message"].get("reasoning", ""))
    assert len(thoughts) > 3


def test_all_of_it_went_on_graphs(servers, answers):
    ours = servers[1]
    assert ours.counter("vllm:spec_decode_num_accepted_tokens") > 0.1 * ours.counter("vllm:gsd_target_steps")
    assert "vllm:gsd_fallbacks_total{" not in ours.get("/metrics")


def test_traced_requests(servers, tmp_path_factory):
    """The trace contains only the requests that asked for it."""
    plain, gsd = servers
    (trace,) = tmp_path_factory.getbasetemp().glob("serve_features[0-9]*/trace.jsonl")
    assert trace.read_text() == ""
    for name in ("chat", "json"):
        endpoint, keys = REQUESTS[name]
        answers = [post(server, endpoint, {**keys, **more}) for server, more in ((plain, {}), (gsd, TRACED))]
        assert choices(answers[0]) == choices(answers[1])
        last = list(read_traces(trace).values())[-1]
        emitted = "".join(text for step in last.steps for text in step["tokens"]["text"])
        assert emitted.removesuffix("<eos>") == answers[1][0]["choices"][0]["message"]["content"]
        assert MESSAGES["messages"][0]["content"] in last.request["prompt"]
        summary = summarise(last.steps)
        assert summary["tokens_per_step"] > 1 and summary["accepted"] > 0
        assert summary["kinds"].keys() >= ({"target", "grammar"} if name == "json" else {"target", "drafted"})
        assert all(step["draft_ms"] > 0 and step["plan"] == "fixed" for step in last.steps[1:])
    assert len(read_traces(trace)) == 2
    refused = {**keys, "vllm_xargs": {"gsd_trace": "yes"}}
    with pytest.raises(AssertionError, match="must be true or false"):
        post(gsd, endpoint, refused)
