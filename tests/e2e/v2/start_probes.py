"""Records an engine's start, and the state it leaves before the first request; see ``interpreter.start_as_on_gpus``."""

from contextlib import contextmanager, nullcontext
from unittest import mock

from engine_process import model_runner
from request_tables import tables


class Start:
    """Records the numbers of rows and calls during a start, and in which memory pools it builds what."""

    def __init__(self):
        self.seen: dict[str, int] = {}
        self.pools: dict[str, list[str]] = {}

    @contextmanager
    def watch_pools(self, worker):
        """Record in which memory pool, which sleep mode keeps or discards, each of our classes is built."""
        from vllm_gsd.engine.draft.features import Features
        from vllm_gsd.engine.draft.model import DraftModel
        from vllm_gsd.engine.v2.device_drafting import DeviceDrafting
        from vllm_gsd.engine.v2.verified_rows import RowBuffers

        tags: list[str] = []

        @contextmanager
        def pool(tag):
            tags.append(tag)
            yield
            tags.pop()

        def noting(method):
            def noted(owner, *args, **kwargs):
                self.pools[type(owner).__name__] = list(tags)  # of nested pools, torch would take the outermost
                return method(owner, *args, **kwargs)

            return noted

        Features.__init__ = noting(Features.__init__)  # built later, with the KV cache
        with (
            mock.patch.object(worker, "_maybe_get_memory_pool_context", pool),
            mock.patch.object(DraftModel, "load", noting(DraftModel.load)),
            mock.patch.object(DeviceDrafting, "__init__", noting(DeviceDrafting.__init__)),
            mock.patch.object(RowBuffers, "__init__", noting(RowBuffers.__init__)),
        ):
            yield

    @contextmanager
    def watch_profile(self, runner):
        """Record the most rows of draft forwards, logits, and stored target states while memory is profiled."""
        speculator = runner.speculator
        drafter = getattr(getattr(speculator, "speculation", None), "drafter", None)
        drafts = keeps = nullcontext(mock.Mock(call_args_list=[]))
        if drafter is not None:
            drafts = mock.patch.object(drafter.model, "run_idle", wraps=drafter.model.run_idle)
            keeps = mock.patch.object(drafter, "keep_idle", wraps=drafter.keep_idle)
        logits = mock.patch.object(runner.model, "compute_logits", wraps=runner.model.compute_logits)
        with drafts as drafted, keeps as kept, logits as computed:
            yield
        self.seen["rows_kept"] = max((len(call.args[0]) for call in kept.call_args_list), default=0)
        self.seen["rows_drafted"] = max((call.args[0] for call in drafted.call_args_list), default=0)
        self.seen["rows_sampled"] = max(len(call.args[0]) for call in computed.call_args_list)

    @contextmanager
    def watch_warm_up(self, runner):
        """Count the steps that verify and that draft graphs while vLLM warms up with dummy requests."""
        if runner.speculator is None:
            yield
            return
        watched = {name: getattr(runner.speculator, name) for name in ("verified", "_grow_on_device")}
        with mock.patch.multiple(runner.speculator, **{n: mock.Mock(wraps=f) for n, f in watched.items()}):
            yield
            self.seen |= {name: getattr(runner.speculator, name).call_count for name in watched}


def remember_start(llm) -> None:
    """Store the state before the first request."""
    start = llm.llm_engine.model_executor.driver_worker.worker.start
    if llm.llm_engine.vllm_config.speculative_config is not None:
        start.left = left(llm)


def left(llm) -> dict[str, int]:
    """Sizes of all state that requests may leave: table entries, learned factors, valid KV, texts, counters."""
    from vllm_gsd.planner.calibration import Calibration

    speculator = model_runner(llm).speculator
    speculation = speculator.speculation
    counts = {name: value for name, value in speculation.stats.counts.items() if name != "cudagraphs_captured"}
    return {
        **tables(llm),
        "learned": int((speculation.planner.calibration.factor != Calibration().factor).sum()),
        "draft_kv_valid": int(speculation.draft_kv.valid.sum()),
        "draft_length": int(speculator.drafting.draft_length.sum()),
        "texts": int(speculator.texts.length.sum()),
        "proposals": int(speculator.proposals.fresh.sum()),
        "counts": len(counts),
    }


def start_of(llm) -> tuple[dict[str, int], dict[str, list[str]], dict[str, int]]:
    """The recorded numbers and memory pools of the start, and the state that it left."""
    start = llm.llm_engine.model_executor.driver_worker.worker.start
    return start.seen, start.pools, start.left
