"""The choice between vLLM's model runners, for which gsd prepares."""

import pytest
import vllm.triton_utils

from vllm_gsd.upstream import hooks, wire


@pytest.mark.parametrize(
    ("setting", "triton", "expected"),
    [(None, False, False), (None, True, True), ("0", True, False), ("1", False, True)],
)
def test_the_runner_is_the_one_that_vllm_takes(monkeypatch, setting, triton, expected):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", setting)
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", triton)
    assert hooks.takes_v2() is expected


def test_our_translations_are_known_again():
    assert all(wire.is_ours(wire.speculative_config(v2, 4)) for v2 in (False, True))
    assert not wire.is_ours({"method": "ngram_gpu"}) and not wire.is_ours(None)
