"""Runs vLLM engines for the tests, each in its own process.

Engines with and without gsd never share a process, so that the reference really is plain vLLM. The processes are forked
from one that has already imported vLLM, which lets an engine for the tiny pair start in a second or two instead of
thirty. Functions whose first argument is ``llm`` run in the engine's process.
"""

import contextlib
import faulthandler
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from forking_server import ENVIRONMENT, ForkingServer
from patience import SECONDS

PROGRAM = Path(__file__).with_name("engine_program.py")
# Engine arguments that a test does not set. They keep engines small.
DEFAULTS = {
    "dtype": "float32",
    "seed": 0,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 1 << 27,
    "disable_log_stats": False,
}


class EngineError(RuntimeError):
    """An error in an engine's process, with its traceback."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation."""

    tokens: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, float]] | None


@dataclass(frozen=True)
class Answer:
    """The result for one prompt."""

    completions: list[Completion]
    prompt_logprobs: list[dict[int, float] | None] | None
    num_cached_tokens: int | None

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens


@dataclass(frozen=True)
class Params:
    """Keyword arguments of ``SamplingParams``, which is built in the engine's process: only that one imports vLLM."""

    keys: dict = field(default_factory=dict)
    bad_words_token_ids: list[list[int]] | None = None  # vLLM tokenizes strings to get these

    def build(self):
        from vllm import SamplingParams
        from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

        keys = dict(self.keys)
        if "structured_outputs" in keys:
            grammar = keys.pop("structured_outputs")
            keys["structured_outputs"] = StructuredOutputsParams(**grammar) if grammar else None
        if "repetition_detection" in keys:
            keys["repetition_detection"] = RepetitionDetectionParams(**keys["repetition_detection"])
        params = SamplingParams(**keys)
        if self.bad_words_token_ids is not None:
            params._bad_words_token_ids = self.bad_words_token_ids
        return params


class Engine:
    """An ``LLM`` in a process of its own.

    Args:
        model: folder of the target.
        speculative_config: as for ``LLM``; None for plain vLLM.
        setup: functions that the engine's process calls with the ``LLM`` once it exists.
        before: functions that the engine's process calls, without arguments, before it imports vLLM.
        options: more arguments for ``LLM``.
    """

    server = ForkingServer("v1")  # forks the engines' processes

    def __init__(self, model, speculative_config=None, setup=(), before=(), **options):
        arguments = {**DEFAULTS, "model": str(model), "speculative_config": speculative_config, **options}
        self.connection, theirs = Pipe()
        path = os.pathsep.join(filter(None, [str(PROGRAM.parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        self.process = subprocess.Popen([self.server.command(), PROGRAM], stdin=theirs.fileno(), env=environment)
        theirs.close()
        self.connection.send(sys.path)  # where it finds the modules of the functions that are sent
        self.connection.send((arguments, setup, before))
        try:
            self.pid = self._receive()
            self._receive()
        except BaseException:
            self.kill()
            raise

    def call(self, function, *args):
        """Run ``function(llm, *args)`` in the engine's process; ``function`` must be picklable."""
        self.connection.send((function, args))
        return self._receive()

    def generate(self, prompts, params) -> list[Answer]:
        """Generate an answer to each prompt, in order. Prompts are token ids, vLLM's dicts, or chat messages (strings).

        Args:
            params: one ``Params`` (or a dict of its keys) for all prompts, or a list with one for each prompt.
        """
        one_for_all = isinstance(params, (dict, Params))
        params = [params] * len(prompts) if one_for_all else params
        params = [p if isinstance(p, Params) else Params(p) for p in params]
        return self.call(generate, list(prompts), params)

    def metrics(self) -> dict[str, float | list[float]]:
        """All values of ``LLM.get_metrics()`` by name, without "vllm:"; only gsd_fallbacks keeps its label."""
        return self.call(metrics)

    def close(self) -> None:
        """Shut the engine down, and check that its process exits by itself."""
        if self.process.poll() is None:
            self.connection.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS)
        exit_code = self.process.returncode
        self.kill()
        assert exit_code == 0, f"the engine's process did not end properly (exit code {exit_code})"

    def _receive(self):
        if not self.connection.poll(SECONDS):
            raise EngineError(f"no answer from the engine within {SECONDS} s: {self._state()}")
        try:
            ok, value = self.connection.recv()
        except EOFError as error:
            raise EngineError("the engine's process died") from error
        if not ok:
            raise EngineError(value)
        return value

    def _state(self) -> str:
        """Describe how busy the process is, to tell a slow one from a hung one; it dumps its stack to stderr."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(1)
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self.pid).cpu_times()
            free = psutil.virtual_memory().available >> 20
            load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
            return f"it has used {times.user:.0f} + {times.system:.0f} s of CPU time; load {load}, {free} MiB free"
        return "its process has exited"

    def kill(self) -> None:
        """End the engine's process at once."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def run(engine: Engine, prompts, params) -> list[list[int]]:
    """Token ids generated for each prompt."""
    return [answer.tokens for answer in engine.generate(prompts, params)]


def main() -> None:
    """Main function of the engine's process: builds the engine, serves calls, shuts down."""
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    connection.send((True, os.getpid()))
    sys.path[:] = connection.recv()
    arguments, setup, before = connection.recv()
    faulthandler.register(signal.SIGUSR1)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # configuring it again takes half a second
    try:
        for function in before:
            function()
        from torch._dynamo import config
        from vllm import LLM

        config.disable = arguments["enforce_eager"]  # see ``preforked``
        if draft_every_level in setup:
            measure_briefly()  # draft_every_level discards the measured costs
        llm = LLM(**arguments)
        for function in setup:
            function(llm)
        connection.send((True, None))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        sys.exit(0)
    while (message := _next_message(connection)) is not None:
        function, args = message
        try:
            connection.send((True, function(llm, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # taking the interpreter down takes long


def _next_message(connection):
    try:
        return connection.recv()
    except EOFError:  # the tests' process has exited
        return None


# --- in the engine's process --------------------------------------------------------------------------


def generate(llm, prompts, params: list[Params]) -> list[Answer]:
    """See ``Engine.generate``."""
    params = [p.build() for p in params]
    if isinstance(prompts[0], str):
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, params, use_tqdm=False)
    else:
        inputs = [prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    return [_answer(output) for output in outputs]


def _answer(output) -> Answer:
    completions = [
        Completion(
            tokens=list(one.token_ids),
            text=one.text,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            logprobs=None if one.logprobs is None else [_plain_logprobs(place) for place in one.logprobs],
        )
        for one in output.outputs
    ]
    prompt = output.prompt_logprobs
    prompt = None if prompt is None else [place and _plain_logprobs(place) for place in prompt]
    return Answer(completions, prompt, output.num_cached_tokens)


def _plain_logprobs(place) -> dict[int, float]:
    return {token: entry.logprob for token, entry in place.items()}


def metrics(llm) -> dict:
    """See ``Engine.metrics``."""
    values = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name == "gsd_fallbacks":
            name = f"{name}:{metric.labels['reason']}"
        values[name] = getattr(metric, "value", getattr(metric, "values", getattr(metric, "count", None)))
    return values


def model_runner(llm):
    """The V1 model runner inside an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler(llm):
    """The scheduler inside an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def measure_briefly() -> None:
    """Measure costs briefly: with two numbers of rows, and without repetition."""
    from vllm_gsd.engine.observe import measure

    def usual_ms(runs, rows=1):
        times = [time.perf_counter()]
        for run in runs:
            run()
            times.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in itertools.pairwise(times)]

    measure.usual_ms, measure.MOST_SECONDS = usual_ms, 0.0


def draft_every_level(llm) -> None:
    """Draft regardless of cost.

    A level of the tiny draft costs as much as a step of the tiny target, so gsd would (rightly) decide not to draft.
    """
    model_runner(llm).speculation.planner.costs = None


def free_blocks(llm) -> int:
    """KV blocks that no request holds."""
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def reset_prefix_cache(llm) -> bool:
    """Drop all cached prefixes; returns False if a request still holds blocks."""
    return llm.reset_prefix_cache()


def gsd_request_state(llm) -> dict[str, int]:
    """The number of requests in each table of the model runner and the plugin."""
    runner = model_runner(llm)
    return {
        "requests": len(runner.requests),
        "trees": len(runner.speculation.trees),
        "known": len(runner.speculation.admitted),
        "draft_kv_blocks": len(runner.speculation.draft_kv.blocks),
        "draft_kv_length": len(runner.speculation.draft_kv.length),
    }
