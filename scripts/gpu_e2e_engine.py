"""One engine of ``gpu_e2e``. It reads a task and writes an answer, both as JSON files."""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

# The engine core runs in this process, so that its counters of CUDA graphs can be read.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def model_folder(task: dict[str, Any], name: str) -> str:
    """A folder with the configuration of a dummy model, or ``name`` itself if it is a real model."""
    if name not in task["models"]:
        return name
    folder = Path(task["folder"]) / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(task["models"][name]))
    return str(folder)


def main() -> None:
    task_file, answer_file = map(Path, sys.argv[1:])
    task: dict[str, Any] = json.loads(task_file.read_text())
    from vllm.compilation.cuda_graph import CUDAGraphLogging

    modes: list[str] = []
    CUDAGraphLogging.observe = lambda self, stat: modes.append(stat.runtime_mode)

    llm = start(task)
    answer_file.write_text(json.dumps([measured(llm, {**task, **run}, modes) for run in task["runs"]]))


def measured(llm: Any, task: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """Measure one run of an engine.

    Args:
        llm: the engine.
        task: the task, with the run's own keys.
        modes: receives the CUDA-graph mode of every forward pass.
    """
    from vllm import SamplingParams
    from vllm.compilation.counter import compilation_counter

    draw, vocabulary = random.Random(0), llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(task["context"])]}
        for _ in range(task["batch"])
    ]

    def generate(max_tokens: int) -> tuple[float, dict[str, float], list[list[int]]]:
        """Seconds, the change of the counters, and the tokens."""
        before, begin = counters(), time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, after = time.perf_counter() - begin, counters()
        change = {name: value - before.get(name, 0) for name, value in after.items()}
        return seconds, change, [list(output.outputs[0].token_ids) for output in outputs]

    generate(task["max_tokens"])  # compiles and captures what the start did not
    prefill, prefill_change, _ = generate(1)
    modes.clear()
    seconds, change, tokens = generate(task["max_tokens"])
    missed = sum(mode in ("NONE", "CUDAGraphMode.NONE") for mode in modes) if modes else None
    replayed = None if missed is None else len(modes) - missed
    # Subtract the prefill from all counters.
    change = {name: value - prefill_change.get(name, 0) for name, value in change.items()}
    return {
        **step_times(change, tokens, seconds - prefill, task["batch"]),
        **(profiled(generate, task["batch"]) if task.get("profile") else {}),
        "captured": compilation_counter.num_cudagraph_captured,
        "replayed": replayed,
        "missed": missed,
        "tokens": tokens if task["kind"] == "lossless" else None,
    }


def profiled(generate: Any, batch: int) -> dict[str, float]:
    """Launches and CUDA graph replays per step, and the share of time in which the GPU is idle.

    The step that reads the prompts is included.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _, change, tokens = generate(24)
    events = profiler.events() or []
    on_gpu = [
        (event.time_range.start, event.time_range.end) for event in events if event.device_type == DeviceType.CUDA
    ]
    steps = 1 + step_times(change, tokens, 0.0, batch)["steps"]
    return launches_and_gaps([event.name for event in events], on_gpu, steps)


def launches_and_gaps(calls: list[str], on_gpu: list[tuple[float, float]], steps: float) -> dict[str, float]:
    """Compute the result of ``profiled`` from the names of the host's calls and the intervals of GPU work."""
    replays = sum("GraphLaunch" in name for name in calls)
    launches = sum(name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")) for name in calls)
    busy, last = 0.0, float("-inf")
    for begin, end in sorted(on_gpu):
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    whole = last - min(on_gpu)[0] if on_gpu else 0.0
    return {"launches": launches / steps, "replays": replays / steps, "idle": 1 - busy / whole if whole else 0.0}


def start(task: dict[str, Any]) -> Any:
    """Start the engine of a task."""
    from vllm import LLM

    speculative = task["speculative"]
    if speculative:
        speculative = {**speculative, "model": model_folder(task, speculative["model"])}
    dummy = task["kind"] != "lossless"
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True} if dummy else {}
    if task["attention_backend"]:
        options["attention_backend"] = task["attention_backend"]
    return LLM(
        model_folder(task, task["target"]),
        dtype=task["dtype"],
        max_model_len=task["context"] + task["max_tokens"] + 8,
        max_num_seqs=max(run["batch"] for run in task["runs"]),
        enforce_eager=not task["cuda_graphs"],
        speculative_config=speculative,
        enable_prefix_caching=False,
        disable_log_stats=False,
        cudagraph_metrics=True,
        **options,
    )


def counters() -> dict[str, float]:
    """The engine's counters by name. vLLM's own ``get_metrics`` truncates seconds to integers."""
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:") and sample.name.endswith("_total"):
                name = sample.name.removesuffix("_total")
                values[name] = values.get(name, 0) + sample.value
    return values


def step_times(change: dict[str, float], tokens: list[list[int]], seconds: float, batch: int) -> dict[str, float]:
    """Milliseconds of a decoding step and of its parts, by the host's clock.

    On a GPU, a part includes waiting for work that earlier parts left running.
    """
    generated = sum(map(len, tokens)) - len(tokens)  # the first tokens are the prefill's
    accepted = change.get("vllm:spec_decode_num_accepted_tokens", 0)
    steps = max(1.0, (generated - accepted) / batch)
    result = {"milliseconds_per_step": 1e3 * seconds / steps, "steps": steps, "accepted": accepted}
    for part in ("verify", "draft", "walk", "compaction"):
        if f"vllm:gsd_{part}_seconds" in change:
            result[f"{part}_ms"] = 1e3 * change[f"vllm:gsd_{part}_seconds"] / steps
    levels = change.get("vllm:gsd_draft_forwards", 0)
    if levels:
        result["draft_level_ms"] = 1e3 * change["vllm:gsd_draft_seconds"] / levels
    return result


if __name__ == "__main__":
    main()
