"""vLLM symbols that ``engine.parallel.ray_executor`` needs: a change in vLLM fails a test that names the symbol."""

import inspect
from types import SimpleNamespace

import ray.util.metrics
from vllm.config import ParallelConfig
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.executor import ray_executor_v2, ray_utils
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.metrics import ray_wrappers
from vllm.v1.worker.cpu_worker import CPUWorker

import vllm_gsd
from vllm_gsd.config import GSDConfig
from vllm_gsd.upstream import ray_ranks, wire


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_cpu_platform_has_no_device_in_ray():
    """When the platform has one, our executor can be removed."""
    assert CpuPlatform.ray_device_key == ""


def test_signatures():
    assert parameters(RayWorkerProc.__init__)[:2] == ["vllm_config", "rank"]
    assert parameters(RayWorkerProc.get_node_and_physical_gpu_ids) == []
    assert parameters(RayWorkerProc.initialize_worker) == [
        "local_rank",
        "env_vars",
        "distributed_init_method",
        "driver_env_vars",
        "assigned_physical_gpu_ids",
    ]
    assert parameters(RayExecutorV2._get_actor_resource_kwargs) == []
    assert parameters(RayExecutorV2._init_executor) == []
    assert parameters(RayExecutorV2.shutdown) == []
    starts = parameters(ray_utils.initialize_ray_cluster)
    assert starts[:2] == ["parallel_config", "ray_address"] and set(starts[2:]) <= {"require_gpu_on_driver"}
    assert parameters(_CPUSHMDistributed.make_group_name) == ["communicator"]


def test_the_executor_makes_the_actors_that_we_put_in_its_module():
    source = inspect.getsource(RayExecutorV2._init_executor)
    assert "ray.remote(RayWorkerProc)" in source
    assert "**resource_kwargs" in source and "num_cpus=0" in source
    assert "initialize_ray_cluster(self.parallel_config" in source
    assert "self.driver_env_vars,\n                    assigned_physical_gpu_ids=" in source
    assert ray_executor_v2.RayWorkerProc is RayWorkerProc
    assert "_init_kwargs" in inspect.getsource(RayWorkerProc.__init__)


def test_a_placement_group_is_made_once():
    """We create the placement group first, to check its nodes, and vLLM then reuses it."""
    source = inspect.getsource(ray_utils.initialize_ray_cluster)
    assert "if parallel_config.placement_group:" in source and "if ray.is_initialized():" in source
    assert "parallel_config.placement_group = current_placement_group" in source


def test_executors_may_be_classes():
    assert "isinstance(distributed_executor_backend, type)" in inspect.getsource(Executor.get_class)
    assert "uses_ray" in inspect.getsource(ParallelConfig.use_ray.fget)
    assert RayExecutorV2.uses_ray
    assert ray_ranks.second_executor()


def test_shared_memory_is_named_by_the_rendezvous():
    """The name is the same on all nodes if ranks meet over TCP, so we add the node to it."""
    assert 'os.environ["VLLM_DIST_IDENT"]' in inspect.getsource(_CPUSHMDistributed.make_group_name)
    assert 'init_method.split(":")[-1]' in inspect.getsource(CPUWorker.init_device)
    assert "_CPUSHMDistributed.make_group_name(self)" in inspect.getsource(
        CpuCommunicator._all_group_ranks_share_shm_group_name
    )


def test_cores_are_told():
    assert {"physical_core", "numa_node"} <= set(vars(get_allowed_cpu_list()[0]))


def test_ray_data_makes_the_engine_configuration_twice():
    """Our code must therefore not change the engine arguments."""
    # Here, because every process of pytest imports all files of tests, and this takes seconds.
    from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMEngineStage, vLLMEngineWrapper

    source = inspect.getsource(vLLMEngineWrapper.__init__)
    assert "engine_args.create_engine_config()" in source and "from_engine_args(" in source
    assert "placement_group_config" in inspect.getsource(vLLMEngineStage.post_init)


def test_our_metrics_are_in_rays_endpoint_too(monkeypatch):
    """Ray Serve and Ray Data replace vLLM's Prometheus logger by one that has other classes of metrics."""
    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray.util.metrics)  # None without ray[serve]
    monkeypatch.setattr(ray_wrappers, "ray_serve", None)
    vllm_gsd.register()
    options = wire.with_options(None, GSDConfig(method="gsd", model=None))
    config = SimpleNamespace(kv_transfer_config=None, additional_config=options)
    names, labels = ["model_name", "engine"], {0: ["tiny", "0"]}
    exports = ray_wrappers.RayPrometheusStatLogger._kv_connector_cls(config, names, labels)
    counted: dict[str, float] = {}
    for metric, add in ((ray.util.metrics.Counter, "inc"), (ray.util.metrics.Histogram, "observe")):
        monkeypatch.setattr(metric, add, lambda self, value, tags: counted.update({self.info["name"]: value, **tags}))
    stats = SimpleNamespace()
    counts, reasons, lengths = {"target_steps": 3}, {"opt_out": 1}, {0: 2}
    wire.attach_metrics(stats, {"counts": counts, "fallbacks": reasons, "accepted_lengths": lengths, "state": {}})
    exports.observe(stats.kv_connector_stats)
    assert counted["vllm_gsd_target_steps"] == 3 and counted["vllm_gsd_accepted_length"] == 0
    assert counted["vllm_gsd_fallbacks"] == 1 and counted["reason"] == "opt_out" and counted["model_name"] == "tiny"
