"""The computations of ``vllm-gsd bench``, without engines."""

import json
import random
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_up_report import report as made_up_report
from typer.testing import CliRunner

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.copies import Copies
from vllm_gsd.planner.planner import Planner
from vllm_gsd.tools.bench import contexts, forms, methods, run, turns
from vllm_gsd.tools.bench.bounds import mean_with_bounds
from vllm_gsd.tools.bench.categories import forms as forms_by_category
from vllm_gsd.tools.bench.engine import TimedRun, untaught
from vllm_gsd.tools.bench.engine import run as answer_job
from vllm_gsd.tools.bench.methods import Drafts, Setting, settings_of, with_off
from vllm_gsd.tools.bench.options import Options
from vllm_gsd.tools.bench.page import bench_page
from vllm_gsd.tools.bench.report import _decode, tokens_per_step
from vllm_gsd.tools.cli.main import app
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import write_whole
from vllm_gsd.tools.prompt_file import Request

PLAIN, GRAPH = (Setting(name, "", None, False) for name in ("plain", "gsd"))


def engines(requests, answer, max_tokens=9, repeats=3):
    """Fake engines that answer a job with ``answer(setting, job)``."""
    args = {"max_model_len": 100}
    work = SimpleNamespace(requests=requests, max_tokens=max_tokens, repeats=repeats, engine_args=args)
    return SimpleNamespace(work=work, turn=lambda setting: nullcontext(partial(answer, setting)))


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
            ms *= next(slow)  # one slow turn of three
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
    with pytest.raises(ToolError, match="--contexts needs two prompts"):
        contexts.check(engines(requests(count), None, max_tokens).work, [4, 40])


def test_contexts_fit_into_the_model():
    work = engines(requests(2), None).work
    contexts.check(work, [4, 91])
    with pytest.raises(ToolError, match=r"--contexts has 92, but .* allow at most 91"):
        contexts.check(work, [4, 92])
    work.engine_args["max_model_len"] = -1  # vLLM then chooses the length
    contexts.check(work, [4, 92])


def test_forms_are_compared_prompt_by_prompt():
    """The first turn only warms up, and one slow turn of three does not affect the result."""
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


@pytest.mark.parametrize("apart", [True, False])
def test_contexts_start_an_engine_for_a_turn_at_most(tmp_path, monkeypatch, apart):
    started = []

    @contextmanager
    def engine(setting, work):
        started.append(setting.name)
        result = {"decode": {"seconds": 1.0, "steps": 8}, "requests": [{"tokens": 9}]}
        yield SimpleNamespace(run=lambda job: result)

    monkeypatch.setattr(turns, "running", engine)
    work = turns.Work(requests(5), [1], 2, 9, {"max_model_len": 100}, tmp_path, apart)
    with turns.Engines(work) as alive:
        contexts.measure({"plain": PLAIN, "gsd": GRAPH}, alive, [4, 40], lambda _: None)
    assert started == ["plain eager", "gsd eager"] + ["gsd eager", "plain eager"] * apart


@pytest.mark.parametrize("apart", [True, False])
def test_forms_share_one_engine_and_analyses_are_compiled_if_anything_is(tmp_path, monkeypatch, apart):
    """With ``--apart`` other engines end after each turn. The order of ``--modes`` has no meaning."""
    started = []

    @contextmanager
    def engine(setting, work):
        started.append(setting)
        yield SimpleNamespace(run=lambda job: {"requests": [{"tokens": 8}], "seconds": 1.0})

    monkeypatch.setattr(turns, "running", engine)
    monkeypatch.setattr(run, "choose", lambda *_: {"gsd": {1: {"setting": GRAPH}}})
    monkeypatch.setattr(run, "take_turns", lambda *_: None)
    monkeypatch.setattr(run, "make_report", lambda *_: {})
    monkeypatch.setattr(run, "bench_page", lambda report: "")
    monkeypatch.setattr(run, "analyse", lambda draft, gsd, compiled, work, tick: compiled)
    work = turns.Work(requests(2), [1], 1, 9, {"model": "target"}, tmp_path, apart)
    both = Options(Path("p"), tmp_path, methods="gsd", modes="compiled,eager", forms=True, analyses=True)
    assert run.bench(both, Drafts.of("draft"), {}, work, {})["analyses"] is True
    assert started == [GRAPH]


def test_shares_of_accepted_nodes_count_copies_from_other_answers():
    accepted = {"native": 5, "merged": 1, "ngram": 1, "shared": 2, "agreed": 1}
    counters = {"vllm:gsd_target_steps": 8, **{f"vllm:gsd_nodes_accepted_{name}": n for name, n in accepted.items()}}
    runs = SimpleNamespace(parts={"gsd": {1: {"requests": [{"counters": counters}]}}})
    found = forms_by_category(runs, SimpleNamespace(requests=requests(1)))["a"]["gsd"]
    assert {name: found[f"accepted_{name}"] for name in accepted} == {name: n / 10 for name, n in accepted.items()}


def test_forms_of_another_model_runner_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="--forms needs Model Runner V1"):
        forms.FormSwitch(SimpleNamespace(speculation=None))


def test_every_source_takes_the_form_that_is_switched_to():
    config = GSDConfig.load({"method": "gsd", "model": None, "top_k": 5})
    speculation = SimpleNamespace(
        config=config, drafter=None, num_nodes=8, planner=Planner(5, 8, 8), copies=Copies(config, 8)
    )
    proposer = SimpleNamespace(clock=SimpleNamespace())
    switch = forms.FormSwitch(SimpleNamespace(speculation=speculation, drafter=proposer))
    for form, top_k in ("gsd-chain", 1), ("gsd", 5):
        switch.to(form)
        assert speculation.config.top_k == speculation.copies.top_k == speculation.planner.limits[0] == top_k


class CutEngine:
    """Answers every request with 3, 6 and 8 tokens; vLLM counts accepted tokens behind the last one, too."""

    def __init__(self):
        self.llm_engine, self.tokens = self, {}

    def add_request(self, name, prompt, params):
        self.tokens[name] = iter([3, 6, 8])

    def step(self):
        counts = {name: next(left) for name, left in self.tokens.items()}
        self.tokens = {name: left for name, left in self.tokens.items() if counts[name] < 8}
        return [
            SimpleNamespace(request_id=name, finished=n == 8, outputs=[SimpleNamespace(token_ids=[0] * n)])
            for name, n in counts.items()
        ]


def test_steps_are_counted_where_counters_go_beyond_the_end():
    timed = TimedRun(CutEngine(), None, None, None)
    timed.answer([[1]] * 4, 2)
    counters = {"vllm:spec_decode_num_accepted_tokens": 4 * 7.0, "vllm:spec_decode_num_drafts": 4 * 2.0}
    result = {"requests": timed.requests, "counters": counters, "decode": timed.decode}
    assert tokens_per_step(result) == pytest.approx(8 / 3)
    usual = _decode([result])
    assert usual["requests"] == usual["drafted"] == 2  # only the first step of a request has no draft


def test_all_our_methods_have_the_kernels_that_were_asked_for():
    off, graph, tree = (
        settings_of(name, drafts=Drafts.of(None), gsd={"cpu_kernels": "off"}, lengths=[1], modes=["eager"])[0]
        for name in ("gsd-off", "gsd", "gsd-tree")
    )
    assert off.engine == graph  # so that only the graph differs
    kernels = settings_of("kernels", drafts=Drafts.of("d"), gsd={"top_k": 3}, lengths=[1], modes=["eager"])[0]
    assert kernels.speculative == {"method": "gsd", "model": None, "sources": []}
    assert off.speculative["cpu_kernels"] == tree.speculative["cpu_kernels"] == "off"


@pytest.mark.parametrize(
    ("prompts", "sizes", "ranks", "repeats"),
    [(12, [1, 4], 1, False), (8, [4], 1, False), (7, [1, 4], 1, True), (1, [1], 1, False), (12, [1], 2, True)],
)
def test_answers_that_a_run_repeats_are_not_copied(prompts, sizes, ranks, repeats):
    """A run repeats prompts if it has fewer than fill a batch twice. Other ranks' answers cannot be dropped."""
    work = turns.Work([Request([])] * prompts, sizes, 1, 8, {"tensor_parallel_size": ranks}, Path())
    assert work.repeats_answers == repeats
    common = {"drafts": Drafts.of(None), "gsd": {}, "lengths": [1], "modes": ["eager"]}
    (setting,) = settings_of("suffix", **common, keeps_answers=not work.repeats_answers)
    assert ("suffix_decoding_max_cached_requests" in setting.speculative) == repeats


def test_a_language_model_serves_without_a_draft_of_ours():
    assert Drafts.of(None, "small") == Drafts(None, "small", None)
    assert Drafts.of(None) == Drafts(None, None, None)


@pytest.mark.parametrize(("kind", "runs"), [("dspark", False), ("dflash2", False), ("dflash", True), ("eagle3", True)])
def test_vllms_own_method_for_a_draft_runs_where_it_can(monkeypatch, kind, runs):
    """vLLM knows DFlash2 drafts as "dflash", and refuses some kinds on a CPU, which would end the comparison."""
    monkeypatch.setattr(methods, "kind_of_model", lambda model: kind)
    for on_gpu in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=on_gpu: found)
        reason = methods.missing_for("eagle", Drafts(None, None, "draft"))
        assert reason == (None if on_gpu or runs else f"needs a GPU for drafts of kind {kind}")
    (setting,) = settings_of("eagle", drafts=Drafts(None, None, "draft"), gsd={}, lengths=[2], modes=["eager"])
    assert setting.speculative == {"method": kind.rstrip("2"), "model": "draft", "num_speculative_tokens": 2}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs ``vllm-gsd bench``; the test fails if an engine starts."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    monkeypatch.setattr(turns.Engine, "__init__", lambda *_: pytest.fail("an engine started"))
    (draft := tmp_path / "draft").mkdir()

    def invoke(*extra):
        pair = ["--target", "target", "--draft", str(draft), "--out", str(tmp_path / "out")]
        return CliRunner().invoke(app, ["bench", str(tmp_path / "prompts.jsonl"), *pair, *extra])

    return invoke


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--gsd", '{"top_kk": 3}'], '"top_kk" is not one of the keys'),
        (["--gsd", '{"top_kk": 3}', "--methods", "plain"], '"top_kk" is not one of the keys'),
        (["--gsd", '{"top-k": 300}'], '"top_k" is 300, but must be'),
        (["--gsd", '{"top-k": 3, "top_k": 3}'], "with '-' and with '_'"),
        (["--gsd", '{"method": "ngram"}'], '--gsd has "method"'),
        (["--gsd", '{"sources": ["ngram"]}'], 'add "draft" or give --target without --draft.'),
        (["--gsd", '{"model": "other"}'], '--gsd has "model"'),
        (["--gsd", '{"sources": []}'], '"sources" in --gsd is empty, so there is no graph to measure'),
        (["--gsd", '{"budget": 8}', "--analyses"], '--gsd has "budget", which --analyses sets itself'),
        (["--gsd", '{"sources": ["draft"]}', "--analyses"], '--gsd has "sources", which --analyses sets itself'),
        (["--contexts", "8,2000"], "--contexts has 2000, but"),
        (["--contexts", "8", "--limit", "1"], "--contexts needs two prompts"),
        (["--engine-args", '{"max_num_seqs": 3}'], '--engine-args has "max_num_seqs"'),
        (["--draft-model", "other"], 'draft" is a language model; leave it out.'),
        (["--forms", "--engine-args", '{"tensor_parallel_size": 2}'], "--forms needs Model Runner V1 and one rank"),
        (["--out", "/dev/null/x"], '--out is "/dev/null/x", but must be a folder'),
        (["--gsd", '{"sources": ["draft", "shared"]}', "--batch-sizes", "2"], '--gsd has the source "shared"'),
    ],
)
def test_mistakes_are_refused_before_an_engine_starts(command, extra, sentence):
    done = command(*extra)
    assert done.exit_code == 1, done.output
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_forms_are_refused_on_gpus(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "--forms needs Model Runner V1 and one rank, so no GPU" in command("--forms").stderr


@pytest.mark.parametrize(
    ("draft", "sentence"), [("nowhere", '--draft is "nowhere"'), ("other", "has 65 tokens in its vocabulary")]
)
def test_drafts_that_do_not_fit_are_refused_before_an_engine_starts(command, tmp_path, draft, sentence):
    for name, size in (("target", 64), ("other", 65)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    path = draft if draft == "nowhere" else str(tmp_path / draft)
    done = command("--target", str(tmp_path / "target"), "--draft", path)
    assert done.exit_code == 1 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_the_kind_of_a_draft_on_the_hub_is_known(command, monkeypatch):
    """Its config.json is downloaded before methods are chosen."""
    found, seen = [], []
    monkeypatch.setattr("vllm_gsd.config.draft_check.find_draft", found.append)
    monkeypatch.setattr(methods, "kind_of_model", lambda model: "eagle3" if found else "language model")
    monkeypatch.setattr(run, "bench", lambda options, drafts, *_: seen.append(drafts) or {"batches": {}})
    assert command("--target", "hub/target", "--draft", "hub/eagle").exit_code == 0
    assert found == ["hub/eagle"] and seen == [Drafts("hub/eagle", None, "hub/eagle")]


def test_the_report_says_what_engines_were_given(command, monkeypatch, tmp_path):
    """The report also has the models' paths, which the page shortens to names."""
    seen = {}

    def bench(options, drafts, gsd, work, settings):
        seen.update(settings=settings, args=work.engine_args, gsd=gsd)
        return {"batches": {}}

    monkeypatch.setattr(run, "bench", bench)
    extra = ["--draft", str(tmp_path / "draft"), "--target", "hub/target", "--gsd", '{"top-k": 3}']
    assert command(*extra, "--engine-args", '{"kv_cache_memory_bytes": 5}').exit_code == 0
    settings = seen["settings"]
    assert (settings["target"], settings["draft"]) == ("hub/target", str(tmp_path / "draft"))
    assert settings["kv_cache_memory_bytes"] == seen["args"]["kv_cache_memory_bytes"] == 5
    named = [settings[name] for name in ("modes", "chain_lengths", "dtype", "draft_kind")]
    assert named == ["eager,compiled", "1,2,3,4,5,6", "bfloat16", "language model"]
    assert seen["gsd"] == {"top_k": 3}
    made = made_up_report()
    page = bench_page({**made, "settings": settings})
    assert str(tmp_path) not in page and "draft: draft" in page and "<title>vllm-gsd bench: target</title>" in page


@pytest.mark.parametrize(
    ("positions", "length"), [(1024, 1024), (32768, 2048), (None, 2048), ("1024", 2048), (-1, 2048)]
)
def test_engines_have_no_more_positions_than_the_target(command, monkeypatch, tmp_path, positions, length):
    seen = {}

    def bench(options, drafts, gsd, work, settings):
        seen.update(work.engine_args)
        return {"batches": {}}

    monkeypatch.setattr(run, "bench", bench)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "target")]
    assert command(*pair).exit_code == 0 and seen["max_model_len"] == length
    assert command(*pair, "--max-model-len", "77").exit_code == 0 and seen["max_model_len"] == 77


def test_a_killed_command_leaves_whole_files(tmp_path, monkeypatch):
    """It may be killed while it writes, or between two files."""
    file = tmp_path / "bench.json"
    write_whole(file, "old")

    def killed(path, text, *_):
        with path.open("w") as stream:
            stream.write(text[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        run._write(made_up_report(), tmp_path)
    assert file.read_text() == "old"


def test_names_that_are_not_unicode_lose_no_result(tmp_path):
    """Names of folders may be, and the categories of a prompt file: JSON can hold half of a surrogate pair."""
    report = made_up_report()
    report["settings"]["target"] = "caf\udce9"
    run._write(report, tmp_path)
    assert "target: caf?" in (tmp_path / "index.html").read_text("utf-8")


def test_a_dead_engine_is_the_reported_error(tmp_path, monkeypatch):
    """An engine may also die between two jobs. Errors of an earlier run in its log are not quoted."""
    answers = "import sys\nfor _ in range(3): sys.stdin.readline(); print('{}', flush=True)\n"
    die = "sys.stderr.buffer.write(b'\\xff\\nMyError: now')"  # in its log some text is not UTF-8
    start = subprocess.Popen
    monkeypatch.setattr(turns.subprocess, "Popen", lambda _, **to: start([sys.executable, "-c", code], **to))
    (tmp_path / "plain-eager.log").write_text("OldError: of yesterday\n")
    work = turns.Work([Request("one")], [1], 1, 4, {}, tmp_path)
    code = answers + die
    with turns.running(PLAIN, work) as engine:
        engine.run({})
        engine.process.wait()
        engine.process.stdin.write("unsent")  # closing flushes it
        with pytest.raises(ToolError, match="died: MyError: now"):
            engine.run({})
    code = "import sys; assert sys.flags.safe_path"  # modules of the folder in which it runs are not taken
    with pytest.raises(ToolError, match="died: see its log"):
        turns.Engine(PLAIN, work)


def test_prompts_that_are_too_long_are_refused_by_the_first_engine(tmp_path, monkeypatch):
    """All prompts are shown to an engine while it warms up, also those that it answers only in the turns."""
    code = (
        "import sys; print('{}', flush=True); sys.stdin.readline(); sys.stderr.write('Error: ' + sys.stdin.readline())"
    )
    start = subprocess.Popen
    monkeypatch.setattr(turns.subprocess, "Popen", lambda _, **to: start([sys.executable, "-c", code], **to))
    with pytest.raises(ToolError, match=r'"later": .*"p9"'):
        turns.Engine(PLAIN, turns.Work([Request(f"p{i}") for i in range(10)], [1], 1, 4, {}, tmp_path))
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=9))
    llm = SimpleNamespace(get_tokenizer=lambda: None, llm_engine=config)
    with pytest.raises(ValueError, match="a prompt has 9 tokens, but --max-model-len is 9"):
        answer_job(llm, None, chats=[[1]], concurrency=1, max_tokens=1, later=[[1], [1] * 9])


def test_opted_out_turns_teach_the_planner_nothing():
    planner = Planner(5, 8, 8)
    worth, factor = planner.worth.copy(), planner.calibration.factor.copy()
    with untaught(SimpleNamespace(speculation=SimpleNamespace(planner=planner))):
        planner.worth *= 0.5
        planner.calibration.factor[:] = 0.25
        planner.steps = 7
    assert np.array_equal(planner.worth, worth) and np.array_equal(planner.calibration.factor, factor)
    assert planner.steps == 1
    with untaught(SimpleNamespace()):  # plain vLLM
        pass


def test_what_the_graph_itself_gains_is_always_measured():
    assert with_off(["plain", "gsd", "gsd-tree"]) == ["plain", "gsd-off", "gsd", "gsd-tree"]
    for given in (["gsd", "gsd-off"], ["plain", "kernels", "ngram"]):
        assert with_off(given) == given
