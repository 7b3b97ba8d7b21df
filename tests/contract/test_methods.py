"""Configs with any of vLLM's own methods are left to vLLM, even if the name resembles ours."""

import typing

import pytest
from vllm.config import speculative

from vllm_gsd.config.schema import _SHARED_KEYS, METHOD, GSDConfig, is_gsd


def names(kind) -> list[str]:
    """All strings of a Literal, which may contain other Literals."""
    return [name for part in typing.get_args(kind) for name in ([part] if isinstance(part, str) else names(part))]


def test_methods_are_left_to_vllm():
    methods = names(speculative.SpeculativeMethod)
    assert {"ngram", "eagle3", "draft_model"} <= set(methods) and METHOD not in methods
    for method in methods:
        assert not is_gsd({"method": method})
        assert not is_gsd({"method": method, "model": "draft", "top_k": 3})


@pytest.mark.parametrize("key", sorted(GSDConfig.model_fields.keys() - _SHARED_KEYS))
def test_our_keys_are_no_keys_of_vllms(key):
    """These keys identify a gsd config whose method is misspelt."""
    assert key not in speculative.SpeculativeConfig.__dataclass_fields__
