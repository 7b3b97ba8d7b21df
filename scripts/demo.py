"""Answers a few prompts with the built-in pair by plain vLLM, by our engine without a graph, and with the graph.

The engine without a graph is gsd's engine with every request opted out. Its speed over plain vLLM is the gain of our
CPU kernels. The speed with the graph over it is the gain of the graph.

Plain vLLM and gsd each run in their own process, so that they do not share threads and memory. They decode one prompt
at a time, greedily, and the texts must be equal. In bfloat16 the logits of two tokens are often equal or one step
apart, and the number of tokens in a forward pass then decides which one wins. Only such differences are excused, and
none with --dtype float32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from generate import steps_of  # beside this file
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.models import built_in_pair

PROMPTS = [
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and show how to call it.",
    "What is the capital of France, and what is it known for?",
    "List five tips for a good night's sleep.",
]
# Two steps of bfloat16 for logits between 16 and 32.
TIE = 0.25

console = Console()


def main() -> None:
    options = parse_options()
    if options.worker:
        work(options)
        return
    try:
        pair = built_in_pair()
    except ToolError as error:
        console.print(error, style="red")
        sys.exit(1)
    # vLLM's draft_model cannot use a draft that reads the target's hidden states.
    draft = pair.draft_model if options.method == "draft_model" else pair.draft
    results = {}
    for method in ("plain", options.method):
        with console.status(f"vLLM, {method}: starting and answering {len(PROMPTS)} prompts"):
            results[method] = run_worker(method, {"target": str(pair.target), "draft": str(draft)})
    plain, graph = results["plain"], results[options.method]
    excused = TIE if options.dtype == "bfloat16" else 0.0
    verdicts = [compare(*texts, excused) for texts in zip(plain["answers"], graph["answers"], strict=True)]
    for prompt, answer, verdict in zip(PROMPTS, graph["answers"], verdicts, strict=True):
        console.print(Panel(Text(answer["text"].strip()), title=prompt, subtitle=verdict))
    off = {"gsd, opted out": graph["off"]} if "off" in graph else {}
    console.print(summary({"plain": plain, **off, options.method: graph}))
    if any("tie within" in verdict for verdict in verdicts):
        console.print("In float32 no tie is excused: ./scripts/demo --dtype float32", style="dim")
    if any(verdict.startswith("DIFFERS") for verdict in verdicts):
        console.print("The graph changed a text: this is a bug.", style="red")
        sys.exit(1)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--compile", action="store_true", help="let vLLM compile the models, which starts slower and runs faster"
    )
    parser.add_argument(
        "--method",
        default="gsd",
        choices=["gsd", "draft_model"],
        help="draft_model is vLLM's own method, for comparison",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_worker(method: str, pair: dict[str, str]) -> dict[str, Any]:
    """Run this script as the worker for one method. Its log is shown only if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        job = json.dumps({"method": method, "result": str(result), **pair})
        with log.open("wb") as stream:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--worker", job],
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0 or not result.exists():
            console.print(log.read_text(errors="replace"), markup=False, highlight=False)
            console.print(f"The engine for {method!r} failed (above is its log).", style="red")
            sys.exit(1)
        return json.loads(result.read_text())


def work(options: argparse.Namespace) -> None:
    """Answer the prompts in this process and write texts and speed to the result file."""
    job = json.loads(options.worker)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    speculative: dict[str, Any] | None = None
    if job["method"] != "plain":
        speculative = {"method": job["method"], "model": job["draft"]}
        if job["method"] == "draft_model":
            speculative["num_speculative_tokens"] = 4
    llm = LLM(
        job["target"],
        speculative_config=speculative,
        dtype=options.dtype,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=not options.compile,
        disable_log_stats=False,  # for the counters below
    )

    def answer(prompt: str, *, graph: bool = True, max_tokens: int = options.max_tokens, **more: Any) -> Any:
        extra_args = None if graph else {"gsd": False}
        params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra_args, **more)
        return llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0].outputs[0]

    def answer_all(graph: bool) -> dict[str, Any]:
        before, started = steps_of(llm), time.perf_counter()
        answers = [answer(prompt, graph=graph) for prompt in PROMPTS]
        return {
            "seconds": time.perf_counter() - started,
            "tokens": sum(len(output.token_ids) for output in answers),
            "steps": steps_of(llm) - before,
            "answers": [{"text": output.text, "tokens": list(output.token_ids)} for output in answers],
        }

    for prompt in PROMPTS:  # warm-up
        answer(prompt, max_tokens=8)
    report = answer_all(graph=True)
    if job["method"] == "gsd":
        report["off"] = answer_all(graph=False)
    if job["method"] == "plain":
        # Untimed, to get the gap between the two best tokens.
        for entry, prompt in zip(report["answers"], PROMPTS, strict=True):
            entry["gaps"] = [gap(position) for position in answer(prompt, logprobs=2).logprobs]
    Path(job["result"]).write_text(json.dumps(report))


def gap(position: dict[int, Any]) -> float:
    """The gap between the logprobs of the two best tokens."""
    best, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
    return best - second


def compare(plain: dict[str, Any], graph: dict[str, Any], excused: float) -> str:
    """Whether two answers have the same tokens, and if not, whether a tie excuses that."""
    pairs = zip(plain["tokens"], graph["tokens"], strict=False)
    place = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        same_length = len(plain["tokens"]) == len(graph["tokens"])
        return "[green]equal to plain vLLM" if same_length else "DIFFERS in length"
    if plain["gaps"][place] <= excused:
        return f"[yellow]equal up to token {place}, where two tokens tie within {excused}"
    return f"DIFFERS from token {place} on"


def summary(runs: dict[str, dict[str, Any]]) -> Table:
    """A table of the runs: plain vLLM, then possibly the engine without a graph, then the graph."""
    table = Table("", "tokens", "tokens / target step", "tokens / s", "over plain", "the graph's gain")
    speeds = {name: run["tokens"] / run["seconds"] for name, run in runs.items()}
    plain, *others = speeds.values()
    gains = {list(speeds)[-1]: others[1] / others[0]} if len(others) == 2 else {}
    for name, run in runs.items():
        table.add_row(
            name,
            str(run["tokens"]),
            f"{run['tokens'] / run['steps']:.2f}",
            f"{speeds[name]:.1f}",
            f"{speeds[name] / plain:.2f}x",
            f"{gains[name]:.2f}x" if name in gains else "",
        )
    return table


if __name__ == "__main__":
    main()
