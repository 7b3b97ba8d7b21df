"""Watches the decode steps of an interpreted engine: their launches on the device, and their waits and copies.

In the interpreter, device tensors are in host memory. ``HostTensors`` therefore distinguishes tensors by their origin:
tensors made from NumPy arrays and lists belong to the host, and so do results computed only from host tensors. All
other tensors belong to the device. Functions with an argument ``llm`` run in the engine's process.
"""

import functools
import sys
from collections import Counter
from contextlib import contextmanager

import torch
from engine_process import model_runner
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique", "equal", "is_nonzero",
    "bincount",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
}  # fmt: skip
# Operators that launch no kernel: they allocate memory without filling it, or make views.
NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
    "resize_",
}
NO_LAUNCH |= {"_local_scalar_dense", "lift_fresh", "detach", "alias", "record_stream", "is_pinned"}
MODEL_PARTS = (
    "compute_logits", "logits_processor", "compute_draft_logits", "markov_embed", "markov_bias", "compute_confidence",
    "map_draft_to_target", "candidate_logits_processor",
)  # fmt: skip
LEVEL_ENDS = "grow_kernel", "best_paths_kernel"  # the last launch of a level, or of a depth of a drafted block


class ViolationError(AssertionError):
    """A decode step waits for the device, or copies from memory that is not pinned."""


class Watch:
    """The current phase of an engine, and the operations counted in its decode steps."""

    def __init__(self, refuse: bool) -> None:
        self.refuse = refuse
        self.allowed = 1  # > 0 while nothing is watched
        self.host_only = 0  # > 0 while a function works on tensors of the host
        self.phases: list[str] = ["other"]
        self.steps: list[Counter] = []  # by (phase, whether in a graph)
        self.levels: list[int] = []  # operations of the draft phase by level, with its start and its end
        self.per_level = 0
        self.names: Counter = Counter()

    def count(self, name: str) -> None:
        """Count one operation."""
        if not self.steps or self.allowed:
            return
        phase = self.phases[-1]
        self.steps[-1][phase, "graph" in self.phases] += 1
        self.names[phase, name] += 1
        if phase == "draft phase":
            self.levels[-1] += 1
            if name.removeprefix("triton ") in LEVEL_ENDS:
                self.levels.append(0)

    def begin_step(self) -> None:
        """Start to count the operations of a new step."""
        self.steps.append(Counter())
        self.levels = [0]

    def end_step(self) -> None:
        """Update the most operations per level. The first and last entries have other operations, too."""
        self.per_level = max(self.per_level, *self.levels[1:-1], 0)

    @contextmanager
    def phase(self, name: str):
        """Count operations in this context as part of a phase."""
        if name == "graph":
            self.count("replay")
            inner = self.phases[-1]
            self.phases.append("graph")
            self.phases.append(inner)
            try:
                yield
            finally:
                del self.phases[-2:]
            return
        self.phases.append(name)
        try:
            yield
        finally:
            self.phases.pop()

    @contextmanager
    def allow(self):
        """Watch nothing in this context, such as the inside of a kernel or a staged copy."""
        self.allowed += 1
        try:
            yield
        finally:
            self.allowed -= 1

    def wrap(self, owner, name: str, phase: str) -> None:
        """Count calls of ``owner.name`` as a phase."""
        upstream = getattr(owner, name)

        @functools.wraps(upstream)
        def wrapped(*args, **kwargs):
            with self.phase(phase):
                return upstream(*args, **kwargs)

        setattr(owner, name, wrapped)

    def stage(self, owner, name: str, operations: int, host: bool = False) -> None:
        """Allow ``owner.name`` to copy between host and device.

        Args:
            owner: object that has the function.
            name: name of a function that does not wait.
            operations: number of operations that it launches on a GPU.
            host: whether its result belongs to the host.
        """
        upstream = getattr(owner, name)

        @functools.wraps(upstream)
        def wrapped(*args, **kwargs):
            for _ in range(operations):
                self.count(name)
            with self.allow():
                result = upstream(*args, **kwargs)
            if host:
                return mark(result)
            # The result of a staged copy belongs to the device, even though it is the same memory here.
            return result.clone() if is_host(result) and not self.allowed else result

        setattr(owner, name, wrapped)


def is_host(value) -> bool:
    """Whether a value is a host tensor."""
    return isinstance(value, torch.Tensor) and getattr(value, "of_host", False)


def mark(value):
    """Mark all tensors in a value as host tensors."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.Tensor):
            tensor.of_host = True
    return value


class HostTensors(TorchFunctionMode):
    """Distinguishes host tensors from device tensors, and refuses operations that make the host wait."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, watch = kwargs or {}, self.watch
        name = getattr(function, "__name__", "")
        if watch.allowed or name == "__get__":
            return function(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        device = [tensor for tensor in tensors if not is_host(tensor)]
        target = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.device)), None)
        if watch.refuse:
            self.check(name, args, tensors, device, target)
        if device or not (tensors or name in ("tensor", "as_tensor")) or target is not None:
            return function(*args, **kwargs)
        watch.host_only += 1
        try:
            return mark(function(*args, **kwargs))
        finally:
            watch.host_only -= 1

    @staticmethod
    def check(name: str, args, tensors, device, target) -> None:
        """Raise for reads from the device and for copies that are not staged."""
        if name in READS and device:
            raise ViolationError(f"{name} reads from the device")
        if name == "where" and len(args) == 1 and device:
            raise ViolationError("where reads from the device")
        if name in ("__getitem__", "__setitem__") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool and not is_host(index)
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        ):
            raise ViolationError("a boolean index reads from the device")
        if name == "repeat_interleave" and any(not is_host(value) for value in tensors[1:]):
            raise ViolationError("repeat_interleave reads from the device")
        if name in ("tensor", "as_tensor") and target is not None:
            raise ViolationError(f"{name} copies from memory that is not pinned")
        mixed = device and any(is_host(tensor) and tensor.dim() for tensor in tensors)
        moved = name in ("to", "cuda") and tensors and is_host(tensors[0]) and target is not None
        if mixed or moved:
            raise ViolationError(f"{name} copies between host and device without staging")


class Operations(TorchDispatchMode):
    """Counts operators that launch a kernel."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name, watch = function.__name__.split(".")[0], self.watch
        if watch.allowed or watch.host_only or function.is_view or name in NO_LAUNCH:
            return result
        # vLLM's own operators return nothing: they write into their arguments.
        if result is None or any(v.numel() for v in tree_leaves(result) if isinstance(v, torch.Tensor)):
            watch.count(name)
        return result


def watch_steps(llm, refuse: bool) -> None:
    """Start to watch decode steps.

    Args:
        llm: the engine.
        refuse: whether a read from the device, a copy without staging or a synchronization raises ``ViolationError``.
    """
    runner, watch = model_runner(llm), Watch(refuse)
    runner.watch = watch
    use_kernels(setattr)
    staged(watch)
    phases(watch, runner)
    count_launches(watch, setattr)
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: from_numpy(array) if watch.allowed else mark(from_numpy(array))
    for owner, name in ((torch.accelerator, "synchronize"), (torch.cuda, "synchronize")):
        setattr(owner, name, functools.partial(synchronized, watch, getattr(owner, name)))
    step(watch, runner)


def start_again(llm) -> None:
    """Forget the steps that were watched."""
    watch = model_runner(llm).watch
    watch.steps.clear()
    watch.names.clear()


def synchronized(watch: Watch, upstream, *args, **kwargs):
    """Replaces a synchronization of the whole device."""
    if watch.refuse and not watch.allowed:
        raise ViolationError("the host waits for the device")
    return None if not watch.allowed else upstream(*args, **kwargs)


def use_kernels(replace) -> None:
    """Run the kernels that GPUs run instead of compiled CPU operators.

    Args:
        replace: sets an attribute, given the object, its name and the new value.
    """
    from vllm_gsd import ops

    upstream = ops.use_kernel
    for module in list(sys.modules.values()):
        if vars(module).get("use_kernel") is upstream:
            replace(module, "use_kernel", lambda tensor: False)


def count_launches(watch: Watch, replace) -> None:
    """Count every launch of a Triton kernel as one operation. See ``use_kernels`` for ``replace``."""
    from triton.runtime.interpreter import InterpretedFunction

    upstream = InterpretedFunction.run

    def run(self, *args, **kwargs):
        watch.count(f"triton {self.__name__}")
        with watch.allow():
            return upstream(self, *args, **kwargs)

    replace(InterpretedFunction, "run", run)


def staged(watch: Watch) -> None:
    """Allow the copies between host and device that do not wait: vLLM's staging, which we use, and late copies."""
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

    from vllm_gsd.engine.v2 import late_copies

    # vLLM's CPU worker replaced this function after some modules had imported it.
    watch.stage(torch_utils, "async_tensor_h2d", 1)
    for module in list(sys.modules.values()):
        if "async_tensor_h2d" in vars(module):
            module.async_tensor_h2d = torch_utils.async_tensor_h2d
    watch.stage(UvaBufferPool, "copy_to_uva", 0)  # kernels read the host's pinned memory
    watch.stage(UvaBufferPool, "copy_to_gpu", 1)
    watch.stage(AsyncOutput, "__init__", 2)  # the tokens and their numbers
    watch.stage(late_copies.LateCopies, "send", 2)
    watch.stage(late_copies._Copy, "values", 0, host=True)


def phases(watch: Watch, runner) -> None:
    """Count the functions of a step as phases."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculator = runner.speculator
    for owner, name, phase in (
        (runner, "prepare_inputs", "inputs"),
        (runner, "prepare_attn", "slots"),
        (verified_rows().DeviceStep, "lay", "lay-out"),
        (runner.model_state, "prepare_attn", "attention metadata"),
        (runner.model, "forward", "target model"),
        (runner.model, "compute_logits", "target logits"),
        (type(runner.rejection_sampler), "__call__", "walk"),
        (runner, "_compact", "KV moves"),
        (speculator, "verified", "late copies"),
        (runner, "postprocess_sampled", "commit"),
        (speculator, "propose", "draft phase"),
        (CudaGraphManager, "run_fullgraph", "graph"),
    ):
        watch.wrap(owner, name, phase)
    drafter = speculator.speculation.drafter
    if drafter is not None:
        layers(watch, drafter.model)


def layers(watch: Watch, model) -> None:
    """Count a draft's own layers as a phase: its forward, its heads, and the selector of a DFlash2 draft."""
    inner = getattr(model.model, "model", None)
    for owner, name in (
        (model, "run_rows"),
        *((model.model, name) for name in MODEL_PARTS),
        *((inner, name) for name in ("candidate_selector",)),
    ):
        if hasattr(owner, name):
            part = getattr(owner, name)
            watch.wrap(*((part, "forward") if isinstance(part, torch.nn.Module) else (owner, name)), "draft model")


def verified_rows():
    """Import this module only here, because only V2 engines can import it."""
    from vllm_gsd.engine.v2 import verified_rows as module

    return module


def step(watch: Watch, runner) -> None:
    """Watch ``execute_model`` and ``sample_tokens`` of steps without prompts."""
    execute, sample = runner.execute_model, runner.sample_tokens
    decodes = False

    def watched(function, *args, **kwargs):
        if not decodes:
            return function(*args, **kwargs)
        watch.allowed -= 1
        try:
            with HostTensors(watch), Operations(watch):
                return function(*args, **kwargs)
        finally:
            watch.allowed += 1

    def execute_model(scheduled, *args, **kwargs):
        nonlocal decodes
        drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        rows = len(scheduled.num_scheduled_tokens) + drafts
        decodes = bool(drafts) and rows == scheduled.total_num_scheduled_tokens
        if decodes:
            watch.begin_step()
        return watched(execute, scheduled, *args, **kwargs)

    def sample_tokens(*args, **kwargs):
        result = watched(sample, *args, **kwargs)
        watch.end_step()
        return result

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def report(llm) -> dict:
    """Operations of the decode step that has the most of them, and each phase's maximum over all steps.

    See ``scripts/count_launches``. The largest step may lack a phase: a step that verifies nothing has no walk.
    """
    watch = model_runner(llm).watch
    largest = max(watch.steps, key=lambda counts: counts.total())
    by_phase, most = _by_phase(largest), Counter()
    for counts in watch.steps:
        most |= _by_phase(counts)
    outside = {phase: count for (phase, in_graph), count in largest.items() if not in_graph}
    drafting = sum(outside.get(phase, 0) for phase in ("draft phase", "draft model"))
    return {
        "decode_steps": len(watch.steps),
        "outside_graphs": sum(outside.values()),
        "outside_graphs_beside_draft_phase": sum(outside.values()) - drafting,
        "draft_phase_beside_model": by_phase["draft phase"],
        "per_level_beside_model": watch.per_level,
        "by_phase": dict(most.most_common()),
        "names": {phase: dict(names) for phase, names in names_of(watch).items()},
    }


def _by_phase(step: Counter) -> Counter:
    """Operations by phase, inside and outside CUDA graphs."""
    totals: Counter = Counter()
    for (phase, _), count in step.items():
        totals[phase] += count
    return totals


def names_of(watch: Watch) -> dict[str, Counter]:
    """The operations of all decode steps, by phase and name."""
    names: dict[str, Counter] = {}
    for (phase, name), count in watch.names.items():
        names.setdefault(phase, Counter())[name] = count
    return names
