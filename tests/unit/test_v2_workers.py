"""The workers of Model Runner V2 measure costs at the right moment of a start."""

from unittest import mock

from vllm.v1.worker import cpu_worker, gpu_worker

from vllm_gsd.engine.v2.cpu_worker import GraphCPUWorker
from vllm_gsd.engine.v2.gpu_worker import GraphGPUWorker


def started(worker_class, base, *methods):
    """The calls of a start, in order: upstream's ``methods``, and what our worker asks of its model runner."""
    calls = mock.Mock()
    worker = object.__new__(worker_class)
    worker.model_runner = calls
    with mock.patch.multiple(base, **{method: getattr(calls, method) for method in methods}):
        getattr(worker, methods[0])()
    return [name for name, *_ in calls.mock_calls]


def test_gpus_measure_before_compilations_are_monitored():
    """With ``--jit-monitor-mode error``, a kernel that is compiled after that ends the start."""
    assert started(GraphGPUWorker, gpu_worker.Worker, "_maybe_activate_jit_monitor") == [
        "measure",
        "speculator.forget_warm_up",
        "_maybe_activate_jit_monitor",
    ]


def test_cpus_measure_after_the_warm_up():
    assert started(GraphCPUWorker, cpu_worker.CPUWorker, "compile_or_warm_up_model") == [
        "compile_or_warm_up_model",
        "measure",
        "speculator.forget_warm_up",
    ]
