"""``vllm-gsd plan`` without engines: its arithmetic compared with enumeration, and plans from a made-up report."""

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_trace import step
from typer.testing import CliRunner

from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.overhead import LEAST_GRAPH_MS
from vllm_gsd.tools.cli.main import app
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.plan.acceptance import Acceptance, fitted, level_rows
from vllm_gsd.tools.plan.fleet import BUSY, replicas
from vllm_gsd.tools.plan.gpus import GPUS, machine_of
from vllm_gsd.tools.plan.machine import Machine, curve
from vllm_gsd.tools.plan.model import Form, Model, Workload
from vllm_gsd.tools.plan.report import Report
from vllm_gsd.tools.plan.run import _row
from vllm_gsd.tools.plan.shapes import Shapes, block_rows, read_shapes
from vllm_gsd.tools.plan.trace import observed

GUESSES = Acceptance(np.array([0.7, 0.6, 0.65]), np.array([1.0, 0.3, 0.1]))
FORM = Form(top_k=3, max_depth=3, num_speculative_tokens=8)
WORK = Workload(prompt=100, answer=50)
ROWS = np.array([1, 8, 64, 512])


def machine(**changes) -> Machine:
    """A machine whose target takes 10 ms for few rows and 0.2 ms per row for many."""
    values = {
        "costs": Costs(ROWS, np.maximum(10.0, 0.2 * ROWS), np.maximum(1.0, 0.02 * ROWS), attention=1e-5),
        "plain": curve([(1, 12), (50, 15), (512, 110)]),
        "off": curve([(1, 11), (50, 12), (512, 105)]),
        "graph_ms": 0.5,
        "node_ms": 0.01,
        "draft_ms": 0.2,
        "level_ms": 0.1,
        "prompt_ms": {name: curve([(1, 30)]) for name in ("plain", "off", "gsd")},
        "most": None,
        "assumptions": [],
    }
    return Machine(**{**values, **changes})


@pytest.mark.parametrize(("top_k", "depth", "nodes"), [(3, 3, 8), (1, 3, 8), (2, 2, 100), (3, 1, 2)])
def test_the_best_graph_is_that_of_all_paths(top_k, depth, nodes):
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(top_k), repeat=length)]
    value = {
        path: math.prod(GUESSES.depth[place] * GUESSES.sibling[rank] for place, rank in enumerate(path))
        for path in paths
    }
    best = sorted(paths, key=value.get, reverse=True)[:nodes]
    chances, depths = GUESSES.graph(top_k, depth, nodes)
    assert chances == pytest.approx([value[path] for path in best])
    assert np.bincount(depths).tolist() == np.bincount([len(path) - 1 for path in best]).tolist()


def test_levels_run_the_nodes_that_may_have_children():
    _, depths = GUESSES.graph(1, 3, 8)
    assert level_rows(depths, 3).tolist() == [1, 1, 1]
    assert level_rows(np.array([0, 0, 0, 1, 1, 2]), 3).tolist() == [1, 2, 1]


def test_the_fitted_acceptance_gives_what_was_measured():
    chances, depths = GUESSES.graph(3, 3, 8)
    measured = np.bincount(depths, chances)
    acceptance = fitted(measured.tolist(), 0.5 * GUESSES.sibling, 3, 8)
    again, places = acceptance.graph(3, 3, 8)
    assert np.bincount(places, again) == pytest.approx(measured, rel=1e-3)
    assert acceptance.depth == pytest.approx(GUESSES.depth, rel=0.02)


def test_the_rate_is_the_best_over_levels_and_nodes():
    """The model's rate equals the best of all numbers of levels and nodes, each computed here."""
    one, requests = Model(machine(), GUESSES, WORK), 4
    best = 0.0
    for levels in (1, 2, 3):
        chances, depths = GUESSES.graph(3, levels, 8)
        rows = requests * level_rows(depths, levels)
        drafting = sum(np.interp(rows, ROWS, np.maximum(1.0, 0.02 * ROWS)) + 0.1)
        for count in range(1, requests * len(chances) + 1):
            taken = np.sort(np.repeat(chances, requests))[::-1][:count].sum()
            target = np.interp(requests + count, ROWS, np.maximum(10.0, 0.2 * ROWS))
            attention = 1e-5 * WORK.context * count
            took = curve([(1, 11), (50, 12)])(4) - 10 + target + attention + 0.5 + 0.2 + drafting + 0.01 * count
            best = max(best, (requests + taken) / took)
    assert one.speculating(requests, FORM) == pytest.approx(best, rel=1e-9)
    assert one.decoding(requests, FORM) == one.speculating(requests, FORM) > requests / one.machine.off(requests)


def test_speculation_turns_off_where_rows_cost():
    one = Model(machine(), GUESSES, WORK)
    last = one.turns_off(FORM, 512)
    assert 2 < last < 512
    assert one.pays(last - 1, FORM) and not one.pays(last, FORM)
    assert one.tokens_per_second(512, FORM) == pytest.approx(one.tokens_per_second(512, FORM, off=True))
    free = machine(costs=Costs(ROWS, np.full(4, 10.0), np.full(4, 0.01), attention=0.0))
    assert Model(free, GUESSES, WORK).turns_off(FORM, 512) is None


def test_the_best_form_is_smaller_where_rows_cost():
    one = Model(machine(), GUESSES, WORK)
    few, many = one.best_form(1, FORM), one.best_form(60, FORM)
    assert one.speculating(1, few) > 0.99 * one.speculating(1, FORM)
    assert (many.num_speculative_tokens, many.max_depth) < (few.num_speculative_tokens, few.max_depth)


def test_the_best_form_may_be_the_largest():
    free = Model(machine(costs=Costs(ROWS, np.full(4, 10.0), np.full(4, 0.01), attention=0.0)), GUESSES, WORK)
    limits = Form(top_k=3, max_depth=3, num_speculative_tokens=6)
    assert free.speculating(1, limits) > 1.01 * free.speculating(1, Form(3, 3, 4))
    assert free.best_form(1, limits).num_speculative_tokens == 6
    costly = Model(machine(), GUESSES, WORK, block=5)
    assert costly.best_form(60, FORM).num_speculative_tokens >= 5  # with fewer nodes a block would be shorter


def test_replicas_follow_littles_law():
    one = Model(machine(), GUESSES, WORK)
    fleet = replicas(one, FORM, 40.0, 2.0, 512)
    assert fleet["seconds_per_request"] * fleet["requests_per_second"] == pytest.approx(fleet["requests_at_once"])
    assert fleet["seconds_per_request"] <= 2.0
    assert (fleet["replicas"] - 1) * fleet["requests_per_second"] * BUSY < 40.0
    assert fleet["replicas"] * fleet["requests_per_second"] * BUSY >= 40.0
    assert replicas(one, None, 40.0, 2.0, 512)["replicas"] >= fleet["replicas"]
    with pytest.raises(ToolError, match="one request alone takes"):
        replicas(one, FORM, 40.0, 0.01, 512)


def test_shapes_count_the_weights_of_the_built_in_models():
    from safetensors import safe_open

    from vllm_gsd.tools.models import built_in_pair

    pair = built_in_pair()
    for folder in (pair.target, pair.draft_model):
        with safe_open(folder / "model.safetensors", "np") as file:
            sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        matrices = sum(size for name, size in sizes.items() if "norm" not in name and "lm_head" not in name)
        config = json.loads((folder / "config.json").read_text())
        vocab = config["vocab_size"]
        if (trimmed := folder / "draft_vocab.json").exists():
            vocab = len(json.loads(trimmed.read_text())["token_ids"])
        embedding = (config["vocab_size"] - vocab) * config["hidden_size"]  # rows that the LM head does not compute
        assert read_shapes(folder).parameters == matrices - embedding


@pytest.mark.parametrize("format", ["own", "speculators"])
def test_shapes_of_an_eagle3_head_are_those_of_its_own_vocabulary(tmp_path, format):
    layer = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": 1000, "head_dim": None,
    }  # fmt: skip
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100, **layer}
    if format == "speculators":
        config = {"speculators_model_type": "eagle3", "draft_vocab_size": 100, "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention, mlp, head = 64 * (32 + 2 * 16) + 32 * 32, 3 * 32 * 48, 100 * 32
    assert read_shapes(tmp_path) == Shapes(attention + mlp + head, 2 * 2 * 16, 1)


@pytest.mark.parametrize(("tied", "embedding"), [(True, 0), (False, 1000 * 32)])
def test_an_embedding_of_its_own_takes_memory(tmp_path, tied, embedding):
    """A forward reads single rows of it."""
    config = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1,
        "vocab_size": 1000, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = read_shapes(tmp_path)
    assert (shapes.parameters, shapes.embedding) == (4 * 32 * 32 + 3 * 32 * 48 + 1000 * 32, embedding)
    huge, draft = Shapes(3e9, 1e5, embedding=20e9), Shapes(1e8, 1e4)
    assert machine_of("h100", huge, draft, WORK).most < machine_of("h100", Shapes(3e9, 1e5), draft, WORK).most


@pytest.mark.parametrize("name", GPUS)
def test_gpus(name):
    """For a 3B target with a small draft, speculation pays for one request, and less when compute-bound."""
    one = machine_of(name, Shapes(3e9, 1e5), Shapes(1e8, 1e4), WORK)
    model = Model(one, GUESSES, WORK)
    assert model.pays(1, FORM)
    assert 1.3 < model.tokens_per_second(1, FORM) / model.tokens_per_second(1, None) < 3
    gains = [model.decoding(count, FORM) / model.decoding(count, None) for count in (1, 64, 1024)]
    assert gains == sorted(gains, reverse=True) and gains[-1] < 1.3
    assert one.most > 100


def report(tmp_path, batches=(1, 4, 16, 64)):
    """Write the report that bench would write on ``machine()``."""
    one = Model(machine(), GUESSES, WORK)
    chances, depths = GUESSES.graph(3, 3, 8)
    costs = one.machine.costs
    planner = {
        "costs": {name: getattr(costs, name).tolist() for name in ("rows", "target", "draft")}
        | {"attention": costs.attention},
        "overhead": {"step": [1.0, 0.1, 0.0, 0.5, 0.01], "draft": [0.2, 0.1]},
        "children": GUESSES.sibling.tolist(),
    }
    rows = {}
    for batch in batches:
        rows[batch] = {}
        for method, form, off in (("plain", None, False), ("gsd-off", FORM, True), ("gsd", FORM, False)):
            speed = one.tokens_per_second(batch, form, off)
            rate = batch / one.machine.off(batch) if off else one.decoding(batch, form)
            rows[batch][method] = {
                "tokens_per_second": {"median": speed},
                "tokens_per_step": {"median": 1.0},
                "decode": {"step_ms": batch / rate, "requests": batch, "nodes": 8.0},
                "answers": {"prompt": WORK.prompt, "tokens": WORK.answer},
                "planner": planner,
                "acceptance_by_depth": np.bincount(depths, chances).tolist(),
            }
        ours = rows[batch]["gsd"]["tokens_per_second"]["median"]
        for name, method in (("plain", "plain"), ("off", "gsd-off")):
            gain = ours / rows[batch][method]["tokens_per_second"]["median"]
            rows[batch]["gsd"][f"ratio_to_{name}"] = {"median": gain}
    gsd = json.dumps({"top_k": 3, "max_depth": 3, "num_speculative_tokens": 8, "theta_prob": 0.01})
    settings = {"gsd": gsd, "target": "big", "draft": "small"}
    (tmp_path / "bench.json").write_text(json.dumps({"settings": settings, "batches": rows}))
    return str(tmp_path / "bench.json")


def test_graphs_cost_at_least_what_the_engines_planner_takes_them_to_cost(tmp_path):
    path = Path(report(tmp_path))
    written = json.loads(path.read_text())
    written["batches"]["1"]["gsd"]["planner"]["overhead"]["step"] = [1.0, 0.1, 0.0, -0.4, -0.02]
    path.write_text(json.dumps(written))
    measured = Report(path)
    of_report = measured.machine(measured.workload())
    assert (of_report.graph_ms, of_report.node_ms) == (LEAST_GRAPH_MS, 0.0)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_what_the_report_says_is_predicted(tmp_path):
    """A plan learned at three batch sizes predicts the gain at the fourth. A wrong measurement is noticed."""
    path = report(tmp_path)
    done = run(path, "--validate", "1,16,64")
    rows = json.loads(done.stdout)["rows"]
    assert done.exit_code == 0, done.output
    assert [row["learned"] for row in rows] == [True, False, True, True]
    assert all(abs(row[over]["error"]) < 0.03 for row in rows for over in ("plain", "off"))
    written = json.loads((tmp_path / "bench.json").read_text())
    written["batches"]["4"]["gsd"]["ratio_to_plain"]["median"] *= 1.2
    (tmp_path / "bench.json").write_text(json.dumps(written))
    assert run(path, "--validate", "1,16,64").exit_code == 1


def test_a_plan(tmp_path):
    options = ["--rate", "30", "--latency", "3", "--out", str(tmp_path / "out")]
    done = run(report(tmp_path), *options)
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert list(plan["batches"]) == [str(2**power) for power in range(10)]
    first = plan["batches"]["1"]
    assert first["graph_over_plain"] > first["chain_over_plain"] > 1
    assert first["graph_over_off"] == pytest.approx(first["graph"] / first["off"])
    keys = plan["gsd_json"]
    assert keys["method"] == "gsd" and keys["model"] == "small" and keys["theta_prob"] == 0.01
    assert plan["fleet"]["graph"]["replicas"] <= plan["fleet"]["plain"]["replicas"]
    assert len(plan["assumptions"]) >= 4
    assert (tmp_path / "out/plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_chain_has_no_more_nodes_than_the_graph(tmp_path):
    path = Path(report(tmp_path))
    chains = []
    for depth in (2, 3):
        given = json.loads(path.read_text())
        keys = {"top_k": 3, "max_depth": depth, "num_speculative_tokens": 2}
        given["settings"]["gsd"] = json.dumps(keys)
        path.write_text(json.dumps(given))
        form = Report(path).form
        model = Model(machine(), GUESSES, WORK)
        chains.append(_row(model, 1, form)["chain"])
    assert chains[0] == chains[1]


@pytest.mark.parametrize("extra", [["--prompt-tokens", "1000"], ["--answer-tokens", "500"]], ids=" ".join)
def test_a_plan_for_other_texts(tmp_path, extra):
    """Ten times the prompt takes ten times as long, and its context is attended in every step."""
    longer = int(extra[1])
    work = Workload(longer, WORK.answer) if "--prompt-tokens" in extra else Workload(WORK.prompt, longer)
    done = run(report(tmp_path), *extra, "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out/plan.json").read_text())
    attended, prompt = 1e-5 * (work.context - WORK.context), 30 * work.prompt / WORK.prompt
    for batch in (1, 4, 16, 64):
        for name in ("plain", "off"):
            step = getattr(machine(), name)(batch) + batch * attended
            expected = 1e3 * work.answer / (prompt + work.answer * step / batch)
            assert found["batches"][str(batch)][name] == pytest.approx(expected, rel=1e-6)


def test_acceptance_of_a_trace(tmp_path):
    """The trace has two graphs, one accepted two levels deep and one not at all, and an unfinished line."""
    deep = {"parent": [-1, -1, 0, 1], "accepted": [False, True, False, True]}
    steps = [deep, {"parent": [-1], "accepted": [False]}, {"parent": [], "accepted": []}]
    lines = [json.dumps({"event": "request", "version": 1, "request": "a"})]
    lines += [json.dumps({**step(1, ["x"], "a"), "verified": verified}) for verified in steps]
    (tmp_path / "trace.jsonl").write_text("\n".join([*lines, '{"event": "st']))
    assert observed(tmp_path / "trace.jsonl") == ([0.5, 0.5], 2.5)
    options = ["--trace", str(tmp_path / "trace.jsonl"), "--out", str(tmp_path / "out")]
    assert run(report(tmp_path), *options).exit_code == 0
    planned = json.loads((tmp_path / "out/plan.json").read_text())["batches"]["1"]
    assert planned["graph"] < Model(machine(), GUESSES, WORK).tokens_per_second(1, FORM)
    (tmp_path / "trace.jsonl").write_text(lines[0] + "\n")
    assert "no accepted node" in run(report(tmp_path), *options).stderr


def test_a_plan_for_a_gpu(tmp_path):
    from vllm_gsd.tools.models import built_in_pair

    pair = built_in_pair()
    models = ["--target", str(pair.target), "--draft", str(pair.draft), "--out", str(tmp_path / "out")]
    done = run(report(tmp_path), "--machine", "h100", *models, "--answer-tokens", "400")
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["workload"] == {"prompt": WORK.prompt, "answer": 400}
    assert "compared with a GPU" in " ".join(plan["assumptions"])
    # Without --draft, the plan is for the report's draft.
    path = Path(report(tmp_path))
    path.write_text(path.read_text().replace('"small"', json.dumps(str(pair.draft))))
    assert run(str(path), "--machine", "h100", *models[:2], *models[4:], "--answer-tokens", "400").exit_code == 0
    assert json.loads((tmp_path / "out/plan.json").read_text()) == plan


def test_a_plan_for_a_gpu_trims_the_draft_as_the_report_did(tmp_path):
    from vllm_gsd.tools.models import built_in_pair

    pair, path = built_in_pair(), Path(report(tmp_path))
    written = json.loads(path.read_text())
    written["settings"]["draft"] = str(pair.target)
    speeds = []
    for size in ("256", "null"):
        written["settings"]["gsd"] = f'{{"draft-vocab-size": {size}}}'
        path.write_text(json.dumps(written))
        done = run(str(path), "--machine", "h100", "--target", str(pair.target), "--out", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        speeds.append(json.loads((tmp_path / "out/plan.json").read_text())["batches"]["1"]["graph"])
    assert speeds[0] > speeds[1]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--machine", "h100"], "needs --target"),
        (["--machine", "h100", "--target", "TARGET"], "small has no config.json"),
        (
            ["--machine", "h100", "--target", "TARGET", "--draft", "BLOCK"],
            "block has no config.json of a Llama-like model",
        ),
        (["--machine", "tpu", "--target", "TARGET", "--draft", "TARGET"], '--machine is "tpu"'),
        (["--machine", "tpu"], '--machine is "tpu"'),
        (["--machine", "h100", "--target", "nowhere"], "has no config.json"),
        (["--machine", "h100", "--target", "HEADLESS"], "headless has no config.json of a Llama-like model"),
        (["--validate", "1,2"], 'has no "plain" at batch size 2'),
        (["--validate", "x"], '--validate is "x"'),
        (["--rate", "3", "--latency", "0.001"], "one request alone takes"),
        (["--latency", "3"], "--latency is only for a fleet; give --rate"),
        (["--target", "TARGET"], "--target is only for a GPU; give --machine"),
        (["--draft", "TARGET"], "--draft is only for a GPU; give --machine"),
        (["--within", "0.2"], "--within is only for --validate"),
        (["--validate", "1,4", "--rate", "3"], "--rate is given with --validate"),
        (["--validate", "1,4", "--machine", "tpu"], "--machine is given with --validate"),
        (["--validate", "1,4", "--out", "plan"], "--out is given with --validate"),
        (["--out", "/dev/null/x"], '--out is "/dev/null/x", but must be a folder'),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(tmp_path, extra, sentence):
    from vllm_gsd.tools.models import built_in_pair

    block = tmp_path / "block"
    block.mkdir()
    (block / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"]}))
    headless = tmp_path / "headless"
    headless.mkdir()
    keys = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 0, "intermediate_size": 64}
    (headless / "config.json").write_text(json.dumps({**keys, "vocab_size": 64}))
    folders = {"TARGET": built_in_pair().target, "BLOCK": block, "HEADLESS": headless}
    extra = [str(folders.get(word, word)) for word in extra]
    out = [] if "--validate" in extra else ["--out", str(tmp_path / "out")]
    done = run(report(tmp_path), *out, *extra)
    assert done.exit_code == 1
    assert sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("gsd", "form"),
    [
        ('{"top-k": 3, "max_depth": 4}', Form(3, 4, 16)),
        ('{"preset": "paper", "max-depth": 2}', Form(4, 2, 16)),
        ('{"preset": "paper", "top_k": 5, "sources": ["draft", "shared"]}', Form(5, 6, 16)),
        ("{}", Form(8, 6, 16)),
    ],
)
def test_the_graphs_of_a_report_are_those_that_ran(tmp_path, gsd, form):
    path = Path(report(tmp_path))
    written = json.loads(path.read_text())
    written["settings"]["gsd"] = gsd
    path.write_text(json.dumps(written))
    assert Report(path).form == form
    written["settings"]["gsd"] = '{"top_k": 300}'
    path.write_text(json.dumps(written))
    assert "no usable keys of gsd" in run(str(path), "--out", str(tmp_path / "out")).stderr


def test_a_report_without_a_draft_is_refused(tmp_path):
    path = Path(report(tmp_path))
    path.write_text(path.read_text().replace('"small"', "null"))
    done = run(str(path), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and "was measured without a draft model" in " ".join(done.stderr.split())


def test_the_kind_of_a_draft_on_another_machine(tmp_path):
    path = Path(report(tmp_path))
    written = json.loads(path.read_text())
    written["settings"]["draft_kind"] = "dspark"
    path.write_text(json.dumps(written))
    done = run(str(path), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and 'small has no config.json with the "block_size"' in " ".join(done.stderr.split())
    written["settings"]["draft_kind"] = "mtp module"
    path.write_text(json.dumps(written))
    done = run(str(path), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and "small is of kind mtp module, but plans are" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"block_size": 6}, [3, 6, 6]),  # the root's row predicts, too
        ({"block_size": 6, "sample_from_anchor": False}, [4, 6, 6]),
        ({"block_size": 6, "architectures": ["DFlashDraftModel"], "dflash_config": {}}, [4, 6, 6]),
    ],
)
def test_rows_of_a_block(tmp_path, keys, rows):
    folder = tmp_path / "dspark"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"], **keys}))
    assert [block_rows(str(folder), depth) for depth in (3, 6, 9)] == rows


def test_a_block_costs_the_same_however_deep_its_graph_is(tmp_path):
    seen = Report(Path(report(tmp_path)))
    model = Model(seen.machine(seen.workload()), seen.acceptance(), seen.workload(), block=400)
    deep, flat = (model.speculating(1.0, Form(4, depth, 16)) for depth in (len(seen.acceptance().depth), 1))
    assert deep > flat
    assert model.speculating(1.0, Form(4, 1, 16)) < replace(model, block=1).speculating(1.0, Form(4, 1, 16))


def test_a_missing_matplotlib_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run(report(tmp_path), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1 and "matplotlib (pip install 'vllm-gsd[bench]')" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["decode", "answers", "tokens_per_step"])
def test_a_report_that_is_not_whole_is_refused(tmp_path, key):
    path = Path(report(tmp_path))
    path.write_text(path.read_text().replace(f'"{key}"', '"something_else"'))
    done = run(str(path), "--out", str(tmp_path / "out"))
    assert (
        done.exit_code == 1 and f"cannot be read as the bench.json of vllm-gsd bench (KeyError('{key}'))" in done.stderr
    )


def test_other_files_are_no_reports(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    assert "cannot be read" in run(str(tmp_path / "other.json")).stderr
