"""A program that runs a session of streaming input: ``streaming_run.py TARGET CONFIG`` prints the result as JSON.

The first chunk requests one token, for which nothing is drafted. The second chunk repeats the first and requests many.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
CHUNK = list(range(100, 140))
MAX_TOKENS = (1, 38)


async def answer(target: str, config: dict | None) -> list[int]:
    """All tokens of the session."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(target, skip_tokenizer_init=True, speculative_config=config, **options)
    )
    params = [
        SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        for count in MAX_TOKENS
    ]
    arrived = asyncio.Event()

    async def chunks() -> AsyncIterator[StreamingInput]:
        for chunk_params in params:
            yield StreamingInput({"prompt_token_ids": CHUNK}, chunk_params)
            await arrived.wait()

    tokens: list[int] = []
    async for output in engine.generate(chunks(), params[0], "session"):
        tokens += output.outputs[0].token_ids
        arrived.set()
    engine.shutdown()
    return tokens


def main(target: str, config: str) -> None:
    """Run the session."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    tokens = asyncio.run(answer(target, json.loads(config)))
    counters = {metric.name: metric.value for metric in get_metrics_snapshot() if hasattr(metric, "value")}
    print(json.dumps({"tokens": tokens, "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
