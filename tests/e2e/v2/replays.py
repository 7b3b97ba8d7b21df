"""Records which full CUDA graphs of an engine were replayed; functions run in the engine's process."""

from engine_process import model_runner


def record_replays(llm) -> None:
    """Start to record replays."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    runner, upstream = model_runner(llm), CudaGraphManager.run_fullgraph
    runner.replayed = set()

    def run_fullgraph(self, desc):
        runner.replayed.add(_key(self, desc))
        return upstream(self, desc)

    CudaGraphManager.run_fullgraph = run_fullgraph


def _key(manager, desc) -> tuple[str, int, int]:
    part = "draft phase" if hasattr(manager, "drafting") else "target"
    return part, desc.num_reqs, desc.uniform_token_count


def replayed(llm) -> list[tuple[str, int, int]]:
    """Graphs that were replayed, named as by ``not_replayed``."""
    return sorted(model_runner(llm).replayed)


def not_replayed(llm) -> list[tuple[str, int, int]]:
    """Captured graphs that were not replayed: part, number of requests, and levels or rows per request."""
    runner = model_runner(llm)
    managers = runner.cudagraph_manager, runner.speculator.draft_graphs
    return sorted({_key(manager, desc) for manager in managers for desc in manager.graphs} - runner.replayed)
