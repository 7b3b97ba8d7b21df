"""Which of vLLM's model runners gsd prepares for."""

import pytest
import vllm.triton_utils
from vllm.engine.arg_utils import EngineArgs

from vllm_gsd.upstream import hooks, wire


@pytest.mark.parametrize(
    ("setting", "triton", "options", "expected"),
    [
        (None, False, {}, False),
        (None, True, {}, True),
        (None, True, {"enable_lora": True}, False),
        (None, True, {"tensor_parallel_size": 2}, True),
        ("0", True, {}, False),
        ("1", False, {}, True),
        ("1", True, {"enable_lora": True}, True),  # and refused then
    ],
)
def test_the_runner_is_the_one_that_vllm_takes(monkeypatch, tmp_path, setting, triton, options, expected):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", setting)
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", triton)
    assert hooks.takes_v2(EngineArgs(model=str(tmp_path), **options)) is expected


def test_our_translations_are_known_again():
    assert all(wire.is_ours(wire.speculative_config(v2, 4)) for v2 in (False, True))
    assert not wire.is_ours({"method": "ngram_gpu"}) and not wire.is_ours(None)
