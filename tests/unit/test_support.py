"""Engine arguments that are refused before the target's configuration is read, and targets that a draft cannot use."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from vllm.config import ModelConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.models.registry import ModelRegistry

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.engine import support
from vllm_gsd.engine.draft.model import draft_model_config

CONFIG = GSDConfig.load({"method": "gsd", "model": None})


@pytest.fixture
def over_ray():
    """Default engine arguments, apart from the executor."""
    options = ("scheduler_cls", "spec_method", "spec_model", "spec_tokens", "watermark_config", "async_scheduling")
    return SimpleNamespace(**dict.fromkeys(options), worker_cls="auto", distributed_executor_backend="ray")


def test_ray_is_not_installed(over_ray, monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    with pytest.raises(GSDConfigError, match=r"Ray is not installed.*pip install \"vllm-gsd\[ray\]\""):
        support.check_engine_args(over_ray, CONFIG)
    over_ray.distributed_executor_backend = "mp"
    support.check_engine_args(over_ray, CONFIG)


def test_the_older_ray_executor(over_ray, monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: name)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(GSDConfigError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0"):
        support.check_engine_args(over_ray, CONFIG)
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    support.check_engine_args(over_ray, CONFIG)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "OPTForCausalLM"])
def test_targets_that_do_not_return_inner_hidden_states(architecture):
    registry = SimpleNamespace(
        resolve_model_cls=lambda names, model: (ModelRegistry._try_load_model_cls(*names), *names)
    )
    target = SimpleNamespace(registry=registry, architectures=[architecture])
    engine = SimpleNamespace(model_config=target, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    refused = pytest.raises(GSDConfigError, match=f"eagle3.*{architecture} does not return the hidden states")
    with refused if architecture == "OPTForCausalLM" else nullcontext():
        support._check_kind("eagle3", CONFIG, engine)
    support._check_kind("eagle", CONFIG, engine)


def test_heads_share_the_targets_embedding():
    engine = SimpleNamespace(model_config=None, parallel_config=SimpleNamespace(tensor_parallel_size=2))
    config = CONFIG.model_copy(update={"draft_tensor_parallel_size": 1})
    with pytest.raises(GSDConfigError, match='"draft_tensor_parallel_size" 1'):
        support._check_kind("eagle", config, engine)
    support._check_kind("language model", config, engine)


@pytest.mark.parametrize(("architecture", "same"), [("MiMoForCausalLM", True), ("Qwen2ForCausalLM", False)])
def test_an_mtp_module_is_read_as_the_rest_of_its_checkpoint(tmp_path, architecture, same):
    """With --quantization fp8_per_tensor it is quantised, too, as with vLLM's own method. Other drafts are not."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 512}
    keys = {"architectures": [architecture], "model_type": "qwen2", "num_nextn_predict_layers": int(same), **shape}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    name, args = "fp8_per_tensor", resolve_quantization_config("fp8_per_tensor", None)
    given = {"revision": "main", "quantization": name, "quantization_config": args}
    target = ModelConfig(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, **given)
    draft = draft_model_config(target, str(tmp_path))
    found = draft.revision, draft.quantization, draft.quantization_config
    assert found == ((target.revision, name, args) if same else (None, None, None))
