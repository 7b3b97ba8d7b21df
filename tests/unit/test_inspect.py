"""The inspector's reader, summary and page with made-up traces; ``test_pages_in_browser`` opens the page."""

import json
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from made_up_trace import HOSTILE, REQUEST, lines, records, step
from typer.testing import CliRunner

from vllm_gsd.tools.cli.main import app
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.inspect.page import inspect_page
from vllm_gsd.tools.inspect.summary import summarise
from vllm_gsd.tools.inspect.trace import Trace, choose, read_traces


def test_several_requests_are_told_apart(tmp_path):
    path = tmp_path / "trace.jsonl"
    other = {**REQUEST, "request": "two"}
    unfinished = json.dumps(step(2, [" b"], "two"))[:40]
    orphan = step(9, [" x"], "three")
    path.write_text(lines([REQUEST, other, step(1, [" a"], "two"), step(1, [" c"]), orphan]) + unfinished)
    traces = read_traces(path)
    assert {name: [one["tokens"]["text"] for one in trace.steps] for name, trace in traces.items()} == {
        "one": [[" c"]],
        "two": [[" a"]],
    }
    assert choose(traces, None, path).request["request"] == "two"
    assert choose(traces, "on", path).request["request"] == "one"
    with pytest.raises(ToolError, match=r'"three".*one, two'):
        choose(traces, "three", path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read"),
        ("", "has no request"),
        ("no JSON\n", "Line 1 .* is not a record"),
        ("[" * 100_000 + "\n", "Line 1 .* is not a record"),
        (lines([{**REQUEST, "request": []}]), "Line 1 .* is not a record"),
        (lines([REQUEST, {"event": "step", "request": REQUEST["request"]}]), "Line 2 .* is not a record"),
        (lines([{**REQUEST, "version": 2}]), "has version 2 .* reads 1"),
    ],
)
def test_files_that_are_no_traces(tmp_path, text, sentence):
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ToolError, match=sentence) as caught:
        read_traces(path)
    assert str(caught.value).endswith(".")


def test_summary():
    steps = [step(1, [" a", " b", " c"]), step(2, [" d"])]
    summary = summarise(steps)
    assert (summary["tokens"], summary["steps"], summary["tokens_per_step"]) == (4, 2, 2)
    assert summary["kinds"] == {"target": 2, "merged": 1, "copied": 1}
    assert summary["nodes"] == {"accepted": 2, "verified": 2, "cut": 2, "left out": 0, "pruned": 8}
    assert (summary["rows"], summary["accepted"]) == (4, 2)
    assert summary["acceptance"] == [
        {"depth": 1, "source": "merged", "verified": 1, "accepted": 1},
        {"depth": 1, "source": "native", "verified": 2, "accepted": 0},
        {"depth": 2, "source": "ngram", "verified": 1, "accepted": 1},
    ]
    assert (summary["draft_forwards"], summary["draft_ms"], summary["verify_ms"]) == (6, 8, 24)
    assert summarise([])["tokens_per_step"] == 0


class Parts(HTMLParser):
    """The scripts of a page with their attributes, and the addresses that its elements would load."""

    def __init__(self, page: str):
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.loads: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))
        self.loads += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]

    def handle_data(self, data):
        if self.inside:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data

    def handle_endtag(self, tag):
        self.inside = False


@pytest.mark.parametrize(("tokens", "hostile"), [(0, False), (50, True), (500, False), (2000, False)])
def test_the_page_holds_its_data_and_nothing_else(tokens, hostile):
    trace = records(tokens, hostile)
    page = inspect_page(Trace(trace[0], trace[1:]))
    parts = Parts(page)
    assert parts.loads == []
    (data, *scripts) = parts.scripts
    assert json.loads(data[1])["steps"] == trace[1:]
    assert len(scripts) == 4
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", page)[1]
    assert [attrs["nonce"] for attrs, _ in scripts] == [nonce] * 4
    assert HOSTILE not in page and "<img" not in page
    assert len(page.encode()) < (1 << 20 if tokens <= 500 else 3 << 20)


def test_the_command(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "page.html"
    trace.write_text(lines(records(20)))
    (tmp_path / "gsd.json").write_text('{"method": "gsd", "model": null, "top_kk": 1}')
    done = CliRunner().invoke(app, ["inspect", str(trace), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["request"] == "one"
    assert "word19" in out.read_text()
    for wrong, sentence in (
        ([], "either a trace or --prompt"),
        ([str(trace), "--prompt", "x"], "either a trace or --prompt"),
        ([str(trace), "--request", "x"], '--request is "x"'),
        ([str(trace), "--out", str(tmp_path)], "must be a file that can be written"),
        (["--prompt", "x", "--target", "t", "--gsd", '{"method": "gsd", "modle": 1}'], '"modle"'),
        (["--prompt", "x", "--target", "t", "--gsd", str(tmp_path / "gsd.json")], 'gsd.json", "top_kk" is not one'),
        ([str(trace), "--out", str(trace)], 'trace.jsonl", which is the trace; give another file'),
        (["--prompt", "x", "--trace", "new", "--out", "new"], '--out is "new", which is the trace'),
        ([str(trace), "--out", "x" * 300], "must be a file that can be written"),
        (["--prompt", "x", "--out", "/dev/null/x"], '--out is "/dev/null/x", but must be a file'),
        (["--prompt", "x", "--trace", "/dev/null/x"], '--trace is "/dev/null/x", but must be a file'),
        (["--prompt", "x", "--request", "one"], "--request is given with --prompt, but is for traces"),
        ([str(trace), "--target", "t"], "--target is given with a trace, but is for --prompt"),
        ([str(trace), "--gsd", "{}"], "--gsd is given with a trace"),
        ([str(trace), "--engine-args", "{}"], "--engine-args is given with a trace"),
        ([str(trace), "--max-tokens", "9"], "--max-tokens is given with a trace"),
    ):
        done = CliRunner().invoke(app, ["inspect", *wrong])
        assert (done.exit_code, done.stdout) == (1, "")
        assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_an_engine_that_fails_is_not_blamed_on_the_page(tmp_path, monkeypatch):
    def no_engine(*_, **__):
        raise OSError("no/such-model is\nno model.")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=no_engine, SamplingParams=None))
    out = tmp_path / "page.html"
    options = ["--prompt", "hi", "--target", "no/such-model", "--gsd", '{"method": "gsd", "model": null}']
    done = CliRunner().invoke(app, ["inspect", *options, "--out", str(out)])
    assert done.exit_code == 1 and not out.exists()
    assert done.stderr == 'The engine of "no/such-model" failed (OSError: no/such-model is no model).\n'


@pytest.mark.parametrize(
    ("gsd", "model"),
    [
        ([], "DRAFT"),
        (["--gsd", '{"method": "gsd", "top_k": 4}'], "DRAFT"),
        (["--gsd", '{"method": "gsd", "model": null, "sources": ["ngram"]}'], None),
        (["--gsd", '{"method": "gsd", "model": null}', "--draft", "other"], "other"),
    ],
)
def test_the_built_in_draft_replaces_no_given_one(tmp_path, monkeypatch, gsd, model):
    def no_engine(target, speculative_config, **_):
        raise OSError(json.dumps(speculative_config["model"]))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=no_engine, SamplingParams=None))
    pair = SimpleNamespace(target="TARGET", draft="DRAFT")
    monkeypatch.setattr("vllm_gsd.tools.models.built_in_pair", lambda: pair)
    done = CliRunner().invoke(app, ["inspect", "--prompt", "x", "--out", str(tmp_path / "page.html"), *gsd])
    assert done.stderr == f'The engine of "TARGET" failed (OSError: {json.dumps(model)}).\n'


@pytest.mark.parametrize("option", ["kept.jsonl", None])
@pytest.mark.parametrize("key", ["own.jsonl", None])
def test_the_trace_is_kept_where_the_config_or_the_option_says(tmp_path, monkeypatch, key, option):
    def no_engine(target, speculative_config, **_):
        raise OSError(speculative_config["trace"])

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=no_engine, SamplingParams=None))
    monkeypatch.chdir(tmp_path)
    gsd = json.dumps({"method": "gsd", "model": None, "trace": key})
    extra = ["--trace", option] if option else []
    done = CliRunner().invoke(app, ["inspect", "--prompt", "x", "--target", "t", "--gsd", gsd, *extra])
    kept = option or key
    assert (f"OSError: {tmp_path / kept})" if kept else "/trace.jsonl)") in done.stderr


def test_without_sources_there_is_no_graph_to_show():
    gsd = json.dumps({"method": "gsd", "model": None, "sources": []})
    done = CliRunner().invoke(app, ["inspect", "--prompt", "x", "--target", "t", "--gsd", gsd])
    assert done.exit_code == 1 and '"sources" in --gsd is empty, so there is no graph to show' in done.stderr


@pytest.mark.parametrize(("positions", "length"), [(2048, 2048), (131072, 4096)])
def test_an_engine_has_no_more_positions_than_its_target(tmp_path, monkeypatch, positions, length):
    def no_engine(*_, max_model_len, **__):
        raise OSError(max_model_len)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=no_engine, SamplingParams=None))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    options = ["--prompt", "x", "--target", str(tmp_path), "--out", str(tmp_path / "page.html")]
    assert f"(OSError: {length})" in CliRunner().invoke(app, ["inspect", *options]).stderr
