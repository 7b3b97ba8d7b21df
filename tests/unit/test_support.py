"""Engine arguments that are refused before the target's configuration is read, and targets that a draft cannot use."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.engine import support

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
