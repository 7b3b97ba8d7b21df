"""A vLLM that lacks a symbol that we wrap works without gsd, and a gsd config is refused with one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from vllm_gsd.upstream.inventory import SUPPORTED_VLLM, patches

ARG_UTILS = "vllm.engine.arg_utils"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
CONNECTOR_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
WRAPPED = [patch.symbol for patch in patches("load")]
# Engines with gsd replace these symbols later (here on a CPU with V1). Fields of vLLM's configs cannot be deleted.
LATER = [
    patch.symbol for patch in patches("engine", "v1", "CPU") if not patch.symbol.startswith(("sys:", "vllm.config"))
]
CASES = {
    **{symbol: ("delete", symbol) for symbol in WRAPPED},
    "no property": ("kind", "vllm.config:VllmConfig.num_lookahead_tokens"),
    "no static method": ("kind", f"{ARG_UTILS}:EngineArgs.add_cli_args"),
    "other parameters": ("parameters", "vllm.sampling_params:SamplingParams._validate_spec_decode"),
    "no module": ("block", "vllm.v1.metrics.loggers"),
    "no module behind a replacement": ("block behind", "vllm.v1.metrics.utils"),
    "no module of the arguments": ("block", ARG_UTILS),
    "nothing missing": ("nothing", "vllm.v1.metrics.loggers:KVConnectorLogging"),
}
NAMED = {name: what.replace(":", ".") for name, (_, what) in CASES.items()}
NAMED["no module behind a replacement"] = f"{CONNECTOR_METRICS}.KVConnectorProm.__init__"
DAMAGED = [name for name in CASES if name != "nothing missing"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    gsd = folder / "gsd.json"
    gsd.write_text(json.dumps({"method": "gsd", "model": None}))
    job = {"model": str(folder), "gsd": str(gsd), "cases": CASES, "later": LATER}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "missing_symbols.py"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "WARNING"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_sentence(text: str, symbol: str) -> None:
    for part in ('"method": "gsd" cannot be served', symbol, f"vLLM {vllm.__version__}", f"vLLM {SUPPORTED_VLLM}"):
        assert part in text
    assert text.strip().endswith(".")
    assert "Traceback" not in text


@pytest.mark.parametrize("case", DAMAGED)
def test_loading_the_plugin_changes_nothing_but_says_so_once(seen, case):
    assert "broken" not in seen[case], seen[case]
    assert seen[case]["registered"] is True
    assert seen[case]["plain"] == seen[case]["plain_before"]
    (warning,) = seen[case]["warnings"]
    for part in ("gsd is off", NAMED[case], f"vLLM {vllm.__version__}", f"vLLM {SUPPORTED_VLLM}"):
        assert part in warning
    assert "\n" not in warning


@pytest.mark.parametrize("case", DAMAGED)
def test_an_engine_that_asks_for_gsd_is_refused_in_one_sentence(seen, case):
    if CASES[case] == ("block", ARG_UTILS):  # no engine can be configured then
        check_sentence(seen[case]["keys"], NAMED[case])
        return
    for way in ("engine", "engine_by_path"):
        assert seen[case][way].startswith("GSDConfigError: ")
        check_sentence(seen[case][way], NAMED[case])


@pytest.mark.parametrize("case", [case for case in DAMAGED if CASES[case] != ("block", ARG_UTILS)])
def test_the_command_line(seen, case):
    plain, by_path, inline, none = seen[case]["command_line"]
    if case != "no static method":  # it breaks vLLM's own command line
        assert plain == "parsed"
        assert none == "parsed" or "add_cli_args" in case  # without it, the option has no type of vLLM's
        for text in (by_path, inline):
            check_sentence(text, NAMED[case])


def test_nothing_is_refused_where_nothing_is_missing(seen):
    answer = seen["nothing missing"]
    assert (answer["registered"], answer["warnings"]) == (True, [])
    assert answer["plain"] == answer["plain_before"]
    assert answer["plain"].startswith("served")
    assert answer["engine"] == answer["engine_by_path"] == "served"
    assert answer["command_line"] == ["parsed"] * 4  # also "None", which vLLM reads as no config


@pytest.mark.parametrize("symbol", LATER)
def test_what_an_engine_replaces_later_is_asked_for_at_once(seen, symbol):
    assert seen["later"] == seen["nothing missing"]["plain"]
    check_sentence(seen[symbol], symbol.replace(":", "."))
