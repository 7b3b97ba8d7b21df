"""The target's answers to varied requests, or to those of a file.

They are stored in files of at most ``Hardware.at_once`` answers. A file that exists is not made again, so a killed run
resumes where it stopped.
"""

from __future__ import annotations

import json
import os
import random
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gsd.tools.distill import prompts
from vllm_gsd.tools.distill.data import SHORTEST, read_columns
from vllm_gsd.tools.distill.hardware import found_hardware
from vllm_gsd.tools.distill.made_up import made_up
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.stages import files_of_answers, kept, logger
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import Chat, read_requests, token_ids_of

if TYPE_CHECKING:
    from vllm import LLM

# Most answers are greedy. The rest are sampled, so that the draft also learns less likely paths.
GREEDY_SHARE = 0.65
# The shares of a file's requests that the target makes up and that are about answers of the RECENT files before. The
# others are from templates, as are all of the first file.
OWN, ABOUT, RECENT = 0.5, 0.3, 8
# The average time of a later file relative to the first one, whose requests are short.
LATER = 1.5
# Without --prompts, answers are in at least so many files, so that few are of the first one's kind.
LEAST_FILES = 8
# The size of the target's KV cache in a CPU's memory.
CPU_CACHE_GIB = 3


def make_answers(options: Options, work: Path, minutes: float | None) -> None:
    """Generate the target's answers in ``work/answers``, as many as the time limit allows, if there is one.

    Raises:
        ToolError: no request leaves room for an answer, the target does not start, or a file is damaged.
    """
    import pyarrow
    from pyarrow import parquet
    from tqdm import tqdm

    folder = work / "answers"
    folder.mkdir(exist_ok=True)
    given = None if options.prompts is None else _given(options)
    most = options.value("answers") if given is None else len(given)
    size = found_hardware().at_once if given else min(found_hardware().at_once, -(-most // LEAST_FILES))

    @cache
    def target() -> LLM:
        # A resumed run must not make up the requests again that it made up before it was killed.
        return start_target(options, options.seed + len(files_of_answers(work)))

    def make(number: int) -> None:
        if (file := folder / f"{number:05d}.parquet").exists():
            return
        rng, first = random.Random(f"{options.seed} {number}"), number * size
        chats = given[first : first + size] if given else _chats(rng, target(), min(size, most - first), work)
        rows = pyarrow.Table.from_pylist(_answered(target(), chats, options, rng))
        parquet.write_table(rows, file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)

    def planned() -> list[int]:
        if minutes is None:
            return [size, most]
        (folder / f"{0:05d}.parquet").unlink(missing_ok=True)  # what a killed run left would be read instead of timed
        begun = time.perf_counter()
        target()
        ready = time.perf_counter()
        make(0)
        now = time.perf_counter()
        later = (now - ready) * (1 if given else LATER)
        return [size, min(most, size * (1 + max(0, int((60 * minutes - (now - begun)) / later))))]

    # The size of files is kept, because a resumed run may find other hardware.
    size, count = kept(work / "answers.json", planned)
    for number in tqdm(range(-(-count // size)), desc="answers", unit="file"):
        make(number)


def start_target(options: Options, seed: int) -> LLM:
    """Start the target in vLLM, configured for throughput.

    Raises:
        ToolError: vLLM refuses the target or its options.
    """
    from vllm import LLM

    # An engine in a process of its own would hold the GPU after this one is killed. On a CPU it would take a core.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    hardware, longest = found_hardware(), options.longest + 1
    on_cpu = hardware.device == "cpu"
    try:
        return LLM(
            options.target,
            dtype=hardware.dtype,
            seed=seed,
            max_model_len=longest,
            max_num_seqs=hardware.at_once,
            # A GPU has no other work meanwhile: vLLM measures what the model leaves and takes it.
            kv_cache_memory_bytes=CPU_CACHE_GIB << 30 if on_cpu else None,
            # To compile takes a CPU two minutes, and the answers hardly come faster.
            enforce_eager=options.eager or on_cpu,
            disable_log_stats=True,
            tokenizer_mode="hf",  # the one for Mistral's own files has no chat template
        )
    except Exception as error:  # vLLM raises many types
        reason = " ".join(str(error).split()).rstrip(".")
        raise ToolError(
            f"The engine of {options.target!r} does not start for {longest} tokens, one more than --longest "
            f"({type(error).__name__}: {reason[:300]})."
        ) from error


def _given(options: Options) -> list[Chat]:
    """The requests of ``--prompts`` in random order: they may be sorted, and not all of them may be answered."""
    from transformers import AutoTokenizer

    chats = [request.chat for request in read_requests(Path(str(options.prompts)))]
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.target)
    except Exception as error:  # transformers raises many types
        reason = " ".join(str(error).split())
        raise ToolError(f"The tokenizer of {options.target!r} cannot be loaded ({reason[:300]}).") from error
    found = [chat for chat in chats if len(token_ids_of(tokenizer, chat)) + SHORTEST <= options.longest]
    if not found:
        raise ToolError(
            f"--longest is {options.longest}, but all {len(chats)} requests are too long for an answer within it; "
            "raise it."
        )
    if len(found) < len(chats):
        logger.warning(
            "%d of %d requests are left out, because they leave no room for an answer within --longest %d",
            len(chats) - len(found), len(chats), options.longest,
        )  # fmt: skip
    random.Random(options.seed).shuffle(found)
    return found[: options.value("answers")]


def _chats(rng: random.Random, target: LLM, count: int, work: Path) -> list[Chat]:
    """The requests of a file."""
    files = files_of_answers(work)[-RECENT:]
    answered = [(json.loads(chat), text) for file in files for chat, text in read_columns(file, "chat", "text")]
    chats = made_up(target, round(OWN * count)) if answered else []
    chats += prompts.about(rng, round(ABOUT * count), answered)
    return chats + prompts.new(rng, count - len(chats))


def _answered(target: LLM, chats: list[Chat], options: Options, rng: random.Random) -> list[dict[str, Any]]:
    """The rows of a file."""
    from vllm import SamplingParams

    tokenizer, most = target.get_tokenizer(), options.value("max_tokens")
    asked = [token_ids_of(tokenizer, chat)[: options.longest] for chat in chats]
    # Training cuts answers at --longest. An answer without room is one token, and is left out.
    limits = [max(1, min(most, options.longest - len(ids))) for ids in asked]
    # Without per-request seeds: vLLM 0.32 cannot use them on a CPU when a prompt is prefilled in chunks.
    params = [
        SamplingParams(temperature=0.0 if rng.random() < GREEDY_SHARE else 0.8, max_tokens=limit) for limit in limits
    ]
    outputs = target.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
    return [
        {
            "input_ids": [*ids, *output.outputs[0].token_ids],
            "prompt_len": len(ids),
            "chat": json.dumps(chat),
            "text": output.outputs[0].text,
        }
        for chat, ids, output in zip(chats, asked, outputs, strict=True)
    ]
