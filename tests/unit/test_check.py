"""``vllm-gsd check`` on fake model folders, and on installations where vLLM does not start."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_gsd.config import GSDConfig
from vllm_gsd.tools.check import run as check_run
from vllm_gsd.tools.check.model_files import kv_bytes_per_token, weight_bytes
from vllm_gsd.tools.check.pair import check_pair
from vllm_gsd.tools.check.probes import Finding, ask
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import try_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
WEIGHTS = {"a": np.zeros((8, 4), np.float32), "b": np.zeros(6, np.float16)}
BYTES = 8 * 4 * 4 + 6 * 2


@pytest.fixture
def model(tmp_path):
    """``model(name, **config)`` writes a model folder with config.json and weights."""

    def make(name: str, **config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
        save_file(WEIGHTS, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def without_probes(monkeypatch):
    """Replaces all probes by ones that succeed."""
    monkeypatch.setattr(check_run, "ask", lambda topic, question, timeout: [Finding(topic, "ok", "")])


def statuses(findings) -> dict[str, str]:
    return {one.topic: one.status for one in findings}


def pair(target, draft, *dtype):
    return check_pair(str(target), GSDConfig.load({"method": "gsd", "model": draft and str(draft)}), *dtype)


def test_pair_that_fits(model):
    findings, memory = pair(model("target"), model("draft", num_hidden_layers=1))
    assert set(statuses(findings).values()) == {"ok"}
    assert memory == {
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "weight_bytes": BYTES,
        "kv_bytes_per_token": 2 * 1 * 2 * 8 * 2,
        "feature_bytes_per_token": 0,
    }


@pytest.mark.parametrize("modules", [1, 2])
def test_the_mtp_modules_of_the_target(model, modules):
    """All have a layer in the KV cache, although only the first one drafts."""
    folder = model("target", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=modules)
    module = {"model.mtp_layers.0.input_proj.weight": np.zeros((4, 8), np.float32)}
    save_file({**WEIGHTS, **module}, folder / "model.safetensors")
    findings, memory = pair(folder, folder)
    assert set(statuses(findings).values()) == {"ok"}
    assert memory["weight_bytes"] == 4 * 4 * 8
    assert memory["kv_bytes_per_token"] == 2 * modules * 2 * 8 * 2
    assert memory["feature_bytes_per_token"] == 2 * LLAMA["hidden_size"]


def test_a_target_without_the_number_of_its_layers(model):
    folder = model("target", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1, num_hidden_layers=None)
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.mtp_layers.0.input_proj.weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    findings, _ = pair(folder, folder)
    assert findings[-1].status == "failed" and findings[-1].detail.endswith("does not say num_hidden_layers.")


def test_a_text_config_that_is_no_object(model):
    """The other keys are read, and vLLM has its say about this one."""
    assert statuses(pair(model("target", text_config=[1]), model("draft"))[0])["draft"] == "ok"


def test_draft_that_reads_hidden_states(model):
    findings, memory = pair(model("target"), model("draft", architectures=["EagleLlamaForCausalLM"]), "float32")
    assert statuses(findings)["features of the draft"] == "ok"
    assert memory["feature_bytes_per_token"] == 32 * 4
    assert memory["kv_bytes_per_token"] == 2 * 3 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("stored", "given", "dtype"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("float16", {}, "float16"),
        ("float32", {}, "bfloat16"),  # vLLM computes in it only if it is asked to
        ("bfloat16", {"dtype": "float"}, "float32"),
        ("bfloat16", {"dtype": "half"}, "float16"),
        ("float16", {"dtype": "auto"}, "float16"),
    ],
)
def test_memory_is_of_the_type_that_the_engine_computes_in(model, without_probes, stored, given, dtype):
    report = check_run.check(str(model("target", dtype=stored)), str(model("draft")), None, given, 1)
    size = {"float32": 4}.get(dtype, 2)
    assert report["memory"]["dtype"] == dtype and report["memory"]["kv_bytes_per_token"] == 2 * 3 * 2 * 8 * size


def test_a_kv_cache_in_fp8(model, without_probes):
    """Hidden states are not quantised."""
    head = model("draft", architectures=["EagleLlamaForCausalLM"])
    memory = check_run.check(str(model("target")), str(head), None, {"kv_cache_dtype": "fp8_e4m3"}, 1)["memory"]
    assert (memory["dtype"], memory["kv_dtype"]) == ("bfloat16", "fp8")
    assert memory["kv_bytes_per_token"] == 2 * 3 * 2 * 8 and memory["feature_bytes_per_token"] == 2 * 32


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({}, 3 * 2 * 512),
        ({"num_kv_shared_layers": 2}, 2 * 512),
        ({"num_global_key_value_heads": 1, "global_head_dim": 64}, 3 * 64),
        ({"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, 2 * 2 * 8 + 2 * 512),
        ({"per_layer_config": {str(layer): {"head_dim": 16} for layer in range(3)}}, 3 * 2 * 16),
    ],
)
def test_heads_of_gemma_4_have_a_shape_by_layer(model, config, numbers):
    shape = {"model_type": "gemma4_text", "layer_types": ["full_attention"] * 3, "attention_k_eq_v": True}
    assert kv_bytes_per_token({**LLAMA, **shape, **config}, "bfloat16") == 2 * 2 * numbers


def test_no_hidden_states_are_stored_for_blocks(model, monkeypatch):
    """Each step of the target writes their keys and values instead."""
    monkeypatch.setattr("vllm_gsd.tools.check.pair.check_draft_model", lambda *_: None)
    findings, memory = pair(model("target"), model("draft", architectures=["Qwen3DSparkModel"]))
    assert memory["feature_bytes_per_token"] == 0 and "features of the draft" not in statuses(findings)


def test_no_draft(model):
    findings, memory = pair(model("target"), None)
    assert statuses(findings)["draft"] == "note" and memory == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 65}, ["65", "64", "vocabulary"]),
        ({"architectures": ["EagleLlamaForCausalLM"], "hidden_size": 16}, ["16", "32", "hidden states"]),
    ],
)
def test_draft_that_does_not_fit(model, config, words):
    findings, memory = pair(model("target"), model("draft", **config))
    (failed,) = [one for one in findings if one.status == "failed"]
    assert failed.topic == "draft" and all(word in failed.detail for word in words) and memory == {}


def test_folder_that_is_no_draft(model, tmp_path):
    findings, _ = pair(model("target"), tmp_path)
    (failed,) = [one for one in findings if one.status == "failed"]
    assert "without config.json" in failed.detail


@pytest.mark.parametrize("damage", ["missing", "shard", "cut", "no header"])
def test_weights_that_are_missing_or_damaged(model, damage):
    draft = model("draft")
    weights = draft / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "shard":
        index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.write_bytes(weights.read_bytes()[:-4] if damage == "cut" else b"no weights")
    findings, memory = pair(model("target"), draft)
    (failed,) = [one for one in findings if one.status == "failed"]
    assert failed.topic == "weights of the draft" and str(draft) in failed.detail and memory == {}


def test_weights_that_only_vllm_reads_are_no_failure(model, monkeypatch):
    """Weights in PyTorch's own format, and those of a draft of which the hub's cache has only the config.json."""
    target, draft = model("target"), model("draft")
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    findings, memory = pair(target, draft)
    assert statuses(findings)["weights of the draft"] == "note" and "no safetensors" in findings[-1].detail
    (draft / "pytorch_model.bin").unlink()
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(draft / "config.json"))
    findings, memory = pair(target, "some/draft")
    assert statuses(findings)["weights of the draft"] == "note" and "downloads" in findings[-1].detail and memory == {}


def test_vocabulary_that_the_config_leaves_out(model):
    """As in Gemma 3 4B's config.json: the engine knows its size and compares the draft."""
    target = model("target", text_config={"model_type": "gemma3_text", "hidden_size": 32})
    findings, memory = pair(target, model("draft"))
    assert statuses(findings) == {"target": "note"} and memory == {}


def test_weights_in_shards(model):
    folder = model("target")
    save_file({f"other.{name}": weight for name, weight in WEIGHTS.items()}, folder / "other.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors", "c": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(folder) == 2 * BYTES


@pytest.mark.parametrize("target", ["nowhere/at-all", "empty", "no json"])
def test_target_that_is_no_model(model, tmp_path, target):
    folder = tmp_path / target
    if "/" not in target:
        folder.mkdir()
        if target == "no json":
            (folder / "config.json").write_text("{")
    findings, _ = pair(folder if folder.exists() else target, model("draft"))
    assert statuses(findings) == {"target": "failed"}
    assert ("download it first" in findings[0].detail) == ("/" in target)


def test_empty_folder_has_no_weights(tmp_path):
    with pytest.raises(ToolError, match="no safetensors"):
        weight_bytes(tmp_path)


def test_report_of_a_pair(model, without_probes):
    report = check_run.check(str(model("target")), str(model("draft")), None, {}, 1)
    assert report["ok"] and report["memory"]["weight_bytes"] == BYTES
    topics = [one["topic"] for one in report["findings"]]
    assert topics[:3] == ["vLLM", "kernels", "gsd.json"] and topics[-1] == "engine"


def test_wrong_gsd_json(model, tmp_path, without_probes):
    file = tmp_path / "gsd.json"
    file.write_text('{"method": "gsd", "model": null, "budjet": 3}')
    report = check_run.check(str(model("target")), None, str(file), {}, 1)
    failed = [one for one in report["findings"] if one["status"] == "failed"]
    assert not report["ok"] and [one["topic"] for one in failed] == ["gsd.json"]
    assert "budjet" in failed[0]["detail"] and str(file) in failed[0]["detail"]


def test_a_trace_that_cannot_be_written(tmp_path, without_probes):
    keys = {"method": "gsd", "model": None, "trace": str(tmp_path / "trace.jsonl")}
    assert check_run.check(None, None, json.dumps(keys), {}, 5)["ok"]
    assert not (tmp_path / "trace.jsonl").exists()
    keys["trace"] = "/dev/null/trace.jsonl"
    report = check_run.check(None, None, json.dumps(keys), {}, 5)
    details = [one["detail"] for one in report["findings"] if one["status"] == "failed"]
    assert details == ['"trace" is "/dev/null/trace.jsonl", but must be a file that can be written (Not a directory).']


def test_engine_is_not_asked_after_a_failure(model, without_probes):
    report = check_run.check(str(model("target")), str(model("draft", vocab_size=65)), None, {}, 1)
    assert report["findings"][-1]["topic"] == "engine" and report["findings"][-1]["status"] == "unknown"


def test_draft_option_goes_before_the_file(model, without_probes):
    gsd = json.dumps({"method": "gsd", "model": "nowhere", "budget": 3})
    assert check_run.check(str(model("target")), str(model("draft")), gsd, {}, 1)["ok"]


def test_process_that_does_not_answer():
    (finding,) = ask("kernels", {}, 0.01)
    assert finding.status == "failed" and "--timeout" in finding.detail


def test_modules_of_the_folder_in_which_it_runs_are_not_taken(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    assert "failed" not in [finding.status for finding in ask("kernels", {}, 120)]


def test_process_that_fails():
    (finding,) = ask("no such topic", {}, 60)
    assert finding.status == "failed" and "KeyError" in finding.detail


def test_process_whose_output_is_no_text(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf 'caf\\351: no such file\\n' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    (finding,) = ask("kernels", {}, 60)
    assert finding.status == "failed" and finding.detail.endswith("no such file")


# --- the command --------------------------------------------------------------------------------------


def command(*arguments, vllm: str, folder) -> subprocess.CompletedProcess:
    """Run the command in an environment where ``import vllm`` runs the given program."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(vllm)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "vllm_gsd.tools.cli.main", "check", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "300"}, check=False,
    )  # fmt: skip


def test_vllm_that_cannot_be_imported(model, tmp_path):
    options = ["--target", model("target"), "--draft", model("draft"), "--json"]
    done = command(*options, vllm="raise ImportError('libcudart.so: no such file')", folder=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr == "" and list(report) == ["ok", "findings", "memory"]
    assert not report["ok"] and all(list(one) == ["topic", "status", "detail"] for one in report["findings"])
    findings = {one["topic"]: one for one in report["findings"]}
    assert findings["vLLM"]["status"] == "failed" and "libcudart.so" in findings["vLLM"]["detail"]
    assert findings["draft"]["status"] == "ok" and findings["engine"]["status"] == "unknown"
    assert report["memory"]["weight_bytes"] == BYTES


def test_vllm_that_is_too_old(tmp_path):
    done = command(vllm="__version__ = '0.9.1'", folder=tmp_path)
    assert done.returncode == 1 and "0.9.1" in done.stdout and "failed" in done.stdout
    assert "has no platforms" in done.stdout and "Traceback" not in done.stdout + done.stderr


# --- vLLM's own checks, in this process ---------------------------------------------------------------


def engine(target, draft, **arguments):
    from vllm_gsd.tools.check.probe import engine as probe

    gsd = {"method": "gsd", "model": str(draft)}
    arguments = {"model": str(target), "skip_tokenizer_init": True, "speculative_config": gsd, **arguments}
    return {one.topic: one for one in probe({"engine_args": arguments})}


def test_engine_that_would_start(model):
    findings = engine(model("target"), model("draft"))
    assert {one.status for one in findings.values()} == {"ok"}, findings
    assert findings["model runner"].detail in ("V1", "V2") and "Tree" in findings["attention"].detail


def test_engine_that_gsd_refuses(model):
    (finding,) = engine(model("target"), model("draft"), enable_prompt_embeds=True).values()
    assert finding.status == "failed" and "prompt embeddings" in finding.detail


def test_engine_that_vllm_refuses(model):
    (finding,) = engine(model("target"), model("draft"), max_model_len=10**6).values()
    assert finding.status == "failed" and "vLLM rejects this configuration" in finding.detail


def test_every_symbol_is_there():
    from vllm_gsd.tools.check.probe import vllm

    assert {one.topic: one.status for one in vllm({})}["vLLM's symbols"] == "ok"


def test_a_link_to_a_trace_that_is_not_there_yet_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "trace.jsonl")
    (tmp_path / "disk").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    try_file(tmp_path / "link", '"trace"')
    assert (tmp_path / "link").is_symlink() and not any((tmp_path / "disk").iterdir())
    with pytest.raises(ToolError, match=r'"trace" is ".*/loop", but must be a file that can be written'):
        try_file(tmp_path / "loop", '"trace"')
