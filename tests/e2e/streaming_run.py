"""A program that runs sessions of streaming input: ``streaming_run.py TARGET CONFIG`` prints the results as JSON.

All chunks are the same. The first of a session requests one token, for which nothing is drafted. The second requests
many. Further sessions end its answer at one of its tokens, or sample with a seed, among few tokens until they repeat or
among all until a stop token, and have a third chunk.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
CHUNK = list(range(100, 140))
FIRST, SECOND, THIRD = 1, 38, 12  # tokens that the chunks request
MOST_ENDS = 8
SEEDED = {"temperature": 1.0, "stop_token_ids": list(range(3, 60))}


async def session(engine, name: str, *chunks: dict) -> list[int]:
    """All tokens of a session whose chunks have these sampling parameters."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
    params = [SamplingParams(**{**common, **chunk}) for chunk in chunks]
    arrived = asyncio.Event()

    async def inputs() -> AsyncIterator[StreamingInput]:
        for chunk_params in params:
            yield StreamingInput({"prompt_token_ids": [*CHUNK]}, chunk_params)  # vLLM extends the list
            await arrived.wait()

    tokens: list[int] = []
    async for output in engine.generate(inputs(), params[0], name):
        tokens += output.outputs[0].token_ids
        arrived.set()
    return tokens


async def answers(target: str, config: dict | None) -> dict[str, list]:
    """The tokens of the first session, of those that end at its tokens, and of two kinds of seeded ones."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(target, skip_tokenizer_init=True, speculative_config=config, **options)
    )
    first, second, third = ({"max_tokens": count} for count in (FIRST, SECOND, THIRD))
    tokens = await session(engine, "session", first, second)
    ends = list(dict.fromkeys(tokens[FIRST + 1 :]))[:MOST_ENDS]
    sessions = [session(engine, f"ends {end}", first, {**second, "stop_token_ids": [end]}, third) for end in ends]
    repetition = RepetitionDetectionParams(max_pattern_size=1, min_count=4)
    repeating = {"temperature": 1.0, "allowed_token_ids": [70, 71], "repetition_detection": repetition}
    sessions += [
        session(engine, f"{name} {seed}", *({**chunk, **kind, "seed": seed} for chunk in (first, second, third)))
        for name, kind in (("seeded", SEEDED), ("repeating", repeating))
        for seed in range(8)
    ]
    others = await asyncio.gather(*sessions)
    engine.shutdown()
    return {"tokens": tokens, "ended": others[:-16], "seeded": others[-16:-8], "repeating": others[-8:]}


def main(target: str, config: str) -> None:
    """Run the sessions."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    tokens = asyncio.run(answers(target, json.loads(config)))
    counters = {metric.name: metric.value for metric in get_metrics_snapshot() if hasattr(metric, "value")}
    print(json.dumps({**tokens, "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
