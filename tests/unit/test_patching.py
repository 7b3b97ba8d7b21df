"""Replaced symbols are restored, and our tools watch engines without changing their results."""

from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.layers import utils

from vllm_gsd.config import GSDConfigError
from vllm_gsd.upstream import parts, patching

GEMM = "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm"
GROUP_NAME = "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name"


def test_a_function_is_replaced_for_a_while():
    before = utils.dispatch_cpu_unquantized_gemm
    with patching.replaced(GEMM, lambda upstream: (upstream, "ours")):
        assert utils.dispatch_cpu_unquantized_gemm == (before, "ours")
    assert utils.dispatch_cpu_unquantized_gemm is before
    with pytest.raises(ZeroDivisionError), patching.replaced(GEMM, lambda upstream: print):
        raise ZeroDivisionError
    assert utils.dispatch_cpu_unquantized_gemm is before


def test_a_static_method_stays_one():
    before = vars(_CPUSHMDistributed)["make_group_name"]
    with patching.replaced(GROUP_NAME, lambda upstream: staticmethod(lambda communicator: upstream.__name__)):
        assert _CPUSHMDistributed.make_group_name(None) == "make_group_name"
    assert vars(_CPUSHMDistributed)["make_group_name"] is before


def test_a_property_is_given_as_one():
    before = vars(VllmConfig)["num_lookahead_tokens"]
    with patching.replaced("vllm.config:VllmConfig.num_lookahead_tokens", lambda upstream: property(lambda _: 7)):
        assert VllmConfig.num_lookahead_tokens.fget(None) == 7
    assert vars(VllmConfig)["num_lookahead_tokens"] is before


def test_a_symbol_that_is_missing_when_it_is_needed_is_named(monkeypatch):
    monkeypatch.delattr(utils, "dispatch_cpu_unquantized_gemm")
    with pytest.raises(GSDConfigError, match=r"has no vllm\.model_executor\.layers\.utils\.dispatch_cpu"):
        patching.replace(GEMM, lambda upstream: None)


def test_parts_of_a_step_are_wrapped_where_there_are_any():
    runner = SimpleNamespace(
        model=SimpleNamespace(compute_logits=lambda: "logits"),
        _sample=lambda: "sampled",
        _model_forward=lambda: "run",
        compilation_config=SimpleNamespace(
            static_forward_context={
                "layer": SimpleNamespace(impl=SimpleNamespace(forward=lambda: "attended")),
                "other": SimpleNamespace(),
            }
        ),
    )
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=worker), scheduler=SimpleNamespace(schedule=lambda: "scheduled")
    )
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=lambda: "stepped")
    llm = SimpleNamespace(llm_engine=engine)
    assert parts.wrap_parts(llm, lambda method, name, part: lambda: (method(), name, part))
    assert engine.step() == ("stepped", "step", "other")
    assert core.scheduler.schedule() == ("scheduled", "schedule", "scheduler")
    assert runner._sample() == ("sampled", "_sample", "walk")
    assert runner.model.compute_logits() == ("logits", "compute_logits", "target forward")
    layers = runner.compilation_config.static_forward_context
    assert layers["layer"].impl.forward() == ("attended", "forward", "attention")
    assert not parts.wrap_parts(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=None)), None)
    del runner._model_forward  # as on Model Runner V2
    assert not parts.wrap_parts(llm, None)
