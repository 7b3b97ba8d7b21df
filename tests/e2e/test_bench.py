"""``vllm-gsd bench`` on the tiny pair: it runs every method and writes JSON and a page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
VLLM_GSD = [str(Path(sys.executable).with_name("vllm-gsd"))]


@pytest.fixture
def command(tiny_pair, preforked, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"turns": [" ".join(f"w{(7 * i + j) % 500}" for j in range(12))], "category": ("one", "two")[i % 2]}
        for i in range(4)
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return [
        preforked, *VLLM_GSD, "bench", str(prompts), "--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft),
        "--out", str(tmp_path / "out"), "--max-tokens", "12", "--max-model-len", "256", "--dtype", "float32",
        "--modes", "eager", "--engine-args", '{"kv_cache_memory_bytes": 67108864}', "--choose-with", "2",
    ]  # fmt: skip


def check_row(method, row):
    speed = row["tokens_per_second"]
    assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert row["ttft_ms"]["median"] > 0
    assert row["tpot_ms"]["median"] > 0
    assert row["peak_mb"] > 0
    assert row["ratio_to_plain"]["median"] > 0
    assert row["answers"]["prompt"] > 0 and 1 <= row["answers"]["tokens"] <= 12
    assert 0 < row["decode"]["requests"] <= 3 and row["decode"]["step_ms"] > 0
    assert row["planner"] is None  # a fixed budget needs no plan
    parts = row["step_parts_ms"]
    assert sum(parts.values()) == pytest.approx(row["step_ms"])
    assert parts["target forward"] > 0
    assert parts["attention"] > 0
    assert parts["scheduler"] > 0
    if method in ("plain", "gsd-off"):
        assert row["tokens_per_step"]["max"] == 1
        assert "ratio_to_off" not in row
    elif method in ("ngram", "suffix"):  # the prompts contain no repetitions to copy
        assert row["tokens_per_step"]["median"] >= 1
    else:
        assert row["tokens_per_step"]["median"] > 1.1
        assert parts["draft"] > 0
        assert row["acceptance_by_depth"][0] > 0.1
    if method in ("gsd", "gsd-tree", "gsd-chain"):
        gain = row["ratio_to_off"]["median"]
        assert row["efficiency"] == pytest.approx(gain / row["tokens_per_step"]["median"])
        levels = row["draft_levels"]
        assert levels["per_step"] * levels["forward_ms"] == pytest.approx(parts["draft forward"])
        assert levels["per_step"] * levels["beside_ms"] == pytest.approx(parts["draft"])
        assert levels["per_step"] > 1
    else:
        assert "draft_levels" not in row


def test_all_methods(command, tmp_path):
    methods = "plain,draft_model,ngram,suffix,gsd-off,gsd,gsd-tree,gsd-chain"
    command += ["--methods", methods, "--chain-lengths", "2", "--batch-sizes", "1,3", "--repeats", "2"]
    command += ["--contexts", "20,60", "--forms"]
    done = subprocess.run([*command, "--gsd", '{"budget": 8, "cpu_kernels": "off"}'], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)
    report = json.loads(Path(files["report"]).read_text())
    ran = [method for method in methods.split(",") if method not in report["skipped"]]
    assert set(report["skipped"]) <= {"suffix"}
    assert list(report["batches"]) == ["1", "3"]
    for rows in report["batches"].values():
        assert list(rows) == ran
        for method, row in rows.items():
            check_row(method, row)
        logs = {log.stem for log in (tmp_path / "out" / "logs").iterdir()}
        assert "gsd-eager" in logs and "gsd-off-eager" not in logs  # requests that opt out share its engine
        assert rows["plain"]["ratio_to_plain"]["max"] == rows["plain"]["tokens_per_step"]["max"] == 1
        assert rows["gsd"]["tokens_per_step"]["median"] > rows["gsd-chain"]["tokens_per_step"]["median"]
        assert rows["gsd-tree"]["step_parts_ms"]["compaction"] > 0
    assert set(report["categories"]) == {"one", "two"}
    assert set(report["categories"]["one"]) == set(ran)
    for shares in report["forms"].values():
        assert set(shares) == {"gsd", "gsd-tree", "gsd-chain"}
        for form in shares.values():
            assert form["without"] + form["chains"] + form["branched"] == pytest.approx(1)
            accepted = sum(share for name, share in form.items() if name.startswith("accepted_"))
            assert accepted == pytest.approx(1)
        assert shares["gsd"]["branched"] > 0
        assert shares["gsd-tree"]["accepted_merged"] == 0
    assert list(report["contexts"]) == ran
    for method, row in report["contexts"].items():
        assert list(row["step_ms"]) == ["20", "60"]
        assert row["growth"]["low"] <= row["growth"]["mean"] <= row["growth"]["high"]
        assert (row["tokens_per_step"]["60"] > 1.1) == (method not in ("plain", "gsd-off", "ngram", "suffix"))
    assert report["contexts"]["plain"]["tokens_per_step"] == {"20": 1, "60": 1}
    turns = report["forms_in_turns"]
    assert {category: ratios["prompts"] for category, ratios in turns.items()} == {"": 4, "one": 2, "two": 2}
    for category, ratios in turns.items():
        assert list(ratios) == ["prompts", "gsd-tree", "gsd-chain"]
        assert 0.3 < ratios["gsd-tree"]["mean"] < 3
        assert (ratios["gsd-tree"]["low"] is None) == (category != "")  # two prompts are too few for an interval
    assert turns[""]["gsd-tree"]["low"] <= turns[""]["gsd-tree"]["mean"] <= turns[""]["gsd-tree"]["high"]
    page = Path(files["page"]).read_text()
    assert "draft_model K=" in page


def test_a_draft_that_reads_hidden_states(command, tmp_path, tiny_eagle):
    """vLLM's eagle method uses it as its draft. The method draft_model is skipped, because it needs --draft-model."""
    command[command.index("--draft") + 1] = str(tiny_eagle)
    command += ["--methods", "draft_model,eagle", "--chain-lengths", "2", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert list(report["skipped"]) == ["draft_model"]
    (row,) = report["batches"]["1"].values()
    assert row["setting"] == "eagle K=2 eager"
    assert row["tokens_per_step"]["median"] >= 1
    assert row["step_parts_ms"]["draft"] > 0


def test_apart_with_a_choice_and_analyses(command, preforked, tiny_pair, tiny_blocks, tmp_path, monkeypatch):
    """Analyses with a block draft. Those with drafts by level are computed alike (tests/unit/test_bench.py)."""
    from typer.testing import CliRunner

    from vllm_gsd.tools.bench import analyses
    from vllm_gsd.tools.cli.main import app

    monkeypatch.setattr(sys, "executable", preforked)
    monkeypatch.setattr(analyses, "ABLATIONS", {"merge_ngram": [0, 1]})
    monkeypatch.setattr(analyses, "BASE", {**analyses.BASE, "merge_ngram": 1})
    monkeypatch.setattr(analyses, "NODES", [16])
    command[command.index("--draft") + 1] = str(tiny_blocks["dspark"])
    keys = {"num_speculative_tokens": 16, "theta_prob": 0.0, "theta_sib": 0.0}
    command += ["--draft-model", str(tiny_pair.draft), "--gsd", json.dumps(keys)]
    command += ["--methods", "draft_model", "--chain-lengths", "1,2", "--repeats", "1", "--apart", "--analyses"]
    done = CliRunner().invoke(app, command[2:])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    (row,) = report["batches"]["1"].values()
    tried = row["tried"]
    assert set(tried) == {"draft_model K=1 eager", "draft_model K=2 eager"}
    assert row["setting"] == max(tried, key=tried.get)
    assert "ratio_to_plain" not in row
    results = report["analyses"]
    (tree, graph), (chain,) = results["ablations"]["merge_ngram"], results["forms"]["gsd-chain"]
    assert 1 < chain["tokens_per_step"] <= min(row["tokens_per_step"] for row in (tree, graph))
    assert tree["merged_share"] == tree["accepted_merged_share"] == 0 < graph["merged_share"]
    assert graph["tokens_per_draft_forward"] >= graph["tokens_per_step"]  # at most one forward per step
    (ratios,) = results["graph_over_tree"]
    assert ratios["at_equal_cost"] == pytest.approx(ratios["at_equal_nodes"], rel=0.1) and ratios["nodes"] == 16
    assert results["recurring_ngrams"] == {}
    assert '"recurring_ngrams"' in (tmp_path / "out" / "index.html").read_text()  # the page draws the analyses


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--methods", "plain,medusa"], '"medusa" is not a method of the comparison'),
        (["--modes", "fast"], '--modes has "fast"'),
        (["--batch-sizes", "0"], '--batch-sizes is "0"'),
        (["--contexts", "8,-1"], '--contexts is "8,-1"'),
        (["--methods", "plain", "--forms"], '--forms needs "gsd"'),
        (["--chain-lengths", "a"], '--chain-lengths is "a"'),
        (["--gsd", "[]"], "--gsd is '[]'"),
        (["--methods", "plain", "--engine-args", '{"max_model_len": -5}'], "The engine of 'plain eager' died"),
        (["--methods", "gsd", "--gsd", '{"top_q": 3}'], '"top_q" is not one of the keys'),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(command, extra, sentence):
    done = subprocess.run([*command, *extra], capture_output=True, text=True)
    assert done.returncode == 1
    assert sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_prompt_file(tmp_path):
    done = subprocess.run([*VLLM_GSD, "bench", str(tmp_path / "none.jsonl")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be read" in done.stderr
