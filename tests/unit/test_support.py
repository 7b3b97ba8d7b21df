"""Engine arguments refused before the target's configuration is read."""

from types import SimpleNamespace

import pytest

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.engine import support

CONFIG = GSDConfig.load({"method": "gsd", "model": None})


@pytest.fixture
def over_ray():
    """Engine arguments as they come, but for the executor."""
    nothing = dict.fromkeys(("scheduler_cls", "spec_method", "spec_model", "spec_tokens"))
    return SimpleNamespace(**nothing, worker_cls="auto", distributed_executor_backend="ray")


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
