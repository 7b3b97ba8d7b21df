"""The target's answers to the requests, and its states over them.

Answers are stored in shards, which are Parquet files in the work folder. Existing shards are not generated again, so a
killed run resumes where it stopped.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gsd.tools.distill.data import SHORTEST, read_texts
from vllm_gsd.tools.distill.stages import kept, logger
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import Chat, token_ids_of

if TYPE_CHECKING:
    from vllm import LLM

# Most answers are greedy. The rest are sampled, so that the draft also learns less likely paths.
GREEDY_SHARE = 0.65
# The fewest answers of a file. A killed run generates those of an unfinished file again, and a slow CPU takes minutes
# for them.
SHARD = 64
# Requests that the target makes up: maximum tokens and minimum characters of one; at least how many it makes up at a
# time, and at most how many times; and the share that must be new to continue.
OWN_TOKENS, SHORTEST_REQUEST = 96, 9
LEAST_AT_ONCE, MOST_TURNS, LEAST_SHARE = 256, 64, 0.1
# The size of the target's KV cache in a CPU's memory.
CPU_CACHE_GIB = 3


def start_target(target: str, *, max_model_len: int, batch: int, eager: bool, seed: int) -> LLM:
    """Start the target in vLLM, configured for throughput.

    Raises:
        ToolError: vLLM refuses the target or its options.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    from vllm_gsd.tools.distill.hardware import found_hardware

    on_cpu = current_platform.is_cpu()
    # An engine in a process of its own would hold the GPU after this one is killed. On a CPU it would take a core.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        return LLM(
            target,
            dtype=found_hardware().dtype,
            seed=seed,
            max_model_len=max_model_len,
            max_num_seqs=batch,
            # A GPU has no other work meanwhile: vLLM measures what the model leaves and takes it.
            kv_cache_memory_bytes=CPU_CACHE_GIB << 30 if on_cpu else None,
            # The states of inner layers cannot be recorded in compiled models. On a GPU they are not stored.
            enforce_eager=eager or on_cpu,
            disable_log_stats=True,
            # With prefix caching, the hidden states of a shared prefix would be recorded for one answer only.
            enable_prefix_caching=False,
            tokenizer_mode="hf",  # the one for Mistral's own files has no chat template
        )
    except Exception as error:  # vLLM raises many types
        reason = " ".join(str(error).split()).rstrip(".")
        raise ToolError(
            f"The engine of {target!r} does not start for {max_model_len} tokens, which is --longest and --max-tokens "
            f"({type(error).__name__}: {reason[:300]})."
        ) from error


def shard_path(folder: Path, name: str, number: int) -> Path:
    """The path of a shard of a round."""
    return folder / f"{name}-{number:05d}.parquet"


def own_requests(llm: Callable[[], Any], count: int, file: Path, batch: int = SHARD) -> list[Chat]:
    """Requests that the target makes up, by completing the user's turn of its chat template (Magpie, Xu et al. 2024).

    Returns:
        ``count`` chats, fewer if the target repeats itself, and none if it has no chat template.
    """
    requests: list[Chat] = kept(file, lambda: _made_up(llm, count, file, batch))
    return requests


def _made_up(llm: Callable[[], Any], count: int, file: Path, batch: int) -> list[Chat]:
    from vllm import SamplingParams

    target = llm()
    tokenizer = target.get_tokenizer()
    begin, end = user_turn(tokenizer)
    found: dict[str, None] = {}
    at_once = max(LEAST_AT_ONCE, min(batch, count))

    def texts() -> list[str]:
        params = SamplingParams(temperature=1.0, max_tokens=OWN_TOKENS, stop=[end], skip_special_tokens=False)
        asked = target.generate([{"prompt_token_ids": begin}] * at_once, params, use_tqdm=False)
        # Texts that reach the token limit are kept too: they resemble long, truncated requests.
        return [output.outputs[0].text.strip() for output in asked]

    for turn in range(MOST_TURNS if begin else 0):
        asked = kept(file.with_suffix(f".{turn}.json"), texts)
        found.update(dict.fromkeys(text for text in asked if len(text) >= SHORTEST_REQUEST))
        logger.info("the target has made up %d of %d requests", min(len(found), count), count)
        if len(found) >= count or len(found) < (turn + 1) * at_once * LEAST_SHARE:
            break
    return [[{"role": "user", "content": text}] for text in list(found)[:count]]


def user_turn(tokenizer: Any) -> tuple[list[int], str]:
    """Tokens of a chat up to the user's text, and the text that ends the user's turn. Empty without a template."""
    mark = "\x02?\x03"
    if tokenizer.chat_template is None:
        return [], ""
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, _, after = text.partition(mark)
    end = after.strip().split("\n")[0]
    return (tokenizer(before, add_special_tokens=False)["input_ids"], end) if before and end else ([], "")


def fitting(target: str, chats: list[Chat], longest: int) -> list[Chat]:
    """The requests that leave room for an answer within ``longest`` tokens. Those of others would not be learned from.

    Raises:
        ToolError: there are none, or the target has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except Exception as error:  # transformers raises many types
        reason = " ".join(str(error).split())
        raise ToolError(f"The tokenizer of {target!r} cannot be loaded ({reason[:300]}).") from error
    found = [chat for chat in chats if len(token_ids_of(tokenizer, chat)) + SHORTEST <= longest]
    if not found:
        raise ToolError(
            f"--longest is {longest}, but all {len(chats)} requests are too long for an answer within it; raise it."
        )
    return found


def shard_size(batch: int) -> int:
    """The number of answers in a file, if up to ``batch`` requests are answered together."""
    return max(SHARD, batch)


def answer(
    llm: Callable[[], Any], chats: list[Chat], work: Path, name: str, *, max_tokens: int, seed: int, batch: int = SHARD
) -> list[str]:
    """Generate the missing answers of a round and return the text of every answer.

    Args:
        llm: gives the target, and starts it first. Called only if an answer is missing.
        chats: the requests of the round, the same in every run.
        work: the folder of ``answers/{name}-00000.parquet``, ... and ``states`` (see ``data`` and ``states``).
    """
    import pyarrow
    from pyarrow import parquet
    from tqdm import tqdm

    from vllm_gsd.tools.distill import recorder as recording
    from vllm_gsd.tools.distill.states import write

    size = shard_size(batch)
    paths = [shard_path(work / "answers", name, number) for number in range(-(-len(chats) // size))]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    target = llm() if missing else None
    for number in tqdm(missing, desc=f"answers, {name} round", unit="shard"):
        path = paths[number]
        # A killed run may have left states of other, sampled answers.
        (work / "states" / f"{path.stem}.safetensors").unlink(missing_ok=True)
        recorder = recording.Recorder.attached(target)
        outputs = _generate(target, chats[number * size : (number + 1) * size], max_tokens, seed + number)
        if recorder is not None and (found := recorder.take(outputs)) is not None:
            write(found, work / "states", path.stem)
        partial = path.with_suffix(".partial")
        parquet.write_table(pyarrow.Table.from_pylist([_row(output) for output in outputs]), partial)
        partial.rename(path)
    return [text for path in paths for text in read_texts(path)]


def _generate(llm: LLM, chats: list[Chat], max_tokens: int, seed: int) -> list[Any]:
    """The outputs for a shard's chats. The seed decides which of them are greedy."""
    from vllm import SamplingParams

    tokenizer, rng = llm.get_tokenizer(), random.Random(seed)
    longest = llm.llm_engine.model_config.max_model_len - max_tokens
    prompts: list[Any] = [{"prompt_token_ids": token_ids_of(tokenizer, chat)[-longest:]} for chat in chats]
    # Without per-request seeds: vLLM 0.32 cannot use them on a CPU when a prompt is prefilled in chunks.
    params = [
        SamplingParams(temperature=0.0 if rng.random() < GREEDY_SHARE else 0.8, max_tokens=max_tokens) for _ in chats
    ]
    outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
    return outputs


def _row(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "input_ids": [*output.prompt_token_ids, *completion.token_ids],
        "prompt_len": len(output.prompt_token_ids),
        "text": completion.text,
    }
