"""Answers a prompt with an engine in this process and records what its token graphs did."""

import logging
from pathlib import Path
from typing import Any

from vllm_gsd.config import GSDConfigError
from vllm_gsd.config.draft_check import local_folder
from vllm_gsd.config.draft_kind import positions_of
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.inspect.trace import Trace, read_traces
from vllm_gsd.tools.prompt_file import token_ids_of
from vllm_gsd.upstream import wire

# Most tokens of prompt and answer, unless the engine's arguments say otherwise.
LONGEST = 4096


def record(prompt: str, target: str, gsd: dict[str, Any], max_tokens: int, engine_args: dict[str, Any]) -> Trace:
    """Answer ``prompt`` greedily, as a chat where the target has a template for it, and return the trace.

    The file of the trace is the "trace" of ``gsd``, the keys of a gsd.json.

    Raises:
        ToolError: the engine does not start, fails, or did not record its steps.
        GSDConfigError: gsd refuses the models or arguments.
    """
    from vllm import LLM, SamplingParams

    path = Path(gsd["trace"])
    before = read_traces(path).keys() if path.exists() and path.stat().st_size else set()
    # Compiling takes longer than an answer.
    defaults = {
        "max_num_seqs": 1,
        "max_model_len": positions_of(local_folder(target), LONGEST),
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": True,
    }
    try:
        llm = LLM(target, speculative_config=gsd, **{**defaults, **engine_args})
        ids = token_ids_of(llm.get_tokenizer(), [{"role": "user", "content": prompt}])
        params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=wire.asking_for_trace())
        (answer,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    except (GSDConfigError, ToolError):
        raise
    except Exception as error:  # vLLM raises many types
        reason = " ".join(str(error).split()).rstrip(".")
        raise ToolError(f'The engine of "{target}" failed ({type(error).__name__}: {reason[:300]}).') from error
    logging.info("%s", answer.outputs[0].text)
    new = [trace for name, trace in read_traces(path).items() if name not in before]
    if not new or not new[-1].steps:
        raise ToolError(f'The engine recorded no step in "{path}"; the file may be full.')
    return new[-1]
