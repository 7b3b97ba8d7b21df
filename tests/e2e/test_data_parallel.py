"""``--data-parallel-size 2``: two engines behind one server return plain vLLM's tokens, and both serve requests."""

import asyncio
import json
import os
from unittest import mock

import pytest
from patience import SECONDS
from serve_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def requests(random_prompts):
    """Prompts with their sampling parameters."""
    greedy = {"temperature": 0, "max_tokens": 24}
    sampled = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 32}
    return [(ids, {**sampled, "seed": n} if n % 2 else greedy) for n, ids in enumerate(random_prompts(24))]


@pytest.fixture(scope="module")
def expected(start_engine, requests):
    """Tokens of a single plain vLLM engine."""
    answers = start_engine(None).generate([ids for ids, _ in requests], [params for _, params in requests])
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def server(expected, tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_parallel")
    (folder / "gsd.json").write_text(json.dumps({"method": "gsd", "model": str(tiny_pair.draft), "budget": 16}))
    # Two API servers share their metrics in a folder, which must exist before a process imports the metrics library.
    (folder / "metrics").mkdir()
    with (
        mock.patch.dict(os.environ, PROMETHEUS_MULTIPROC_DIR=str(folder / "metrics")),
        serving(
            tiny_pair.target,
            folder,
            speculative_config=folder / "gsd.json",
            data_parallel_size=2,
            kv_cache_memory_bytes=1 << 26,
        ) as server,
    ):
        server.wait()
        yield server


def test_same_tokens_from_two_engines(server, requests, expected):
    from openai import AsyncOpenAI

    async def ask(client, ids, params):
        more = {"return_token_ids": True}
        answer = await client.completions.create(model="target", prompt=ids, extra_body=more, **params)
        return answer.choices[0].token_ids

    async def gather():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS) as client:
            return await asyncio.gather(*[ask(client, ids, params) for ids, params in requests])

    assert asyncio.run(gather()) == expected
    metrics = server.get("/metrics").splitlines()
    for engine in "01":
        label = f'engine="{engine}"'
        accepted = [line for line in metrics if "gsd_nodes_accepted_native_total{" in line and label in line]
        assert len(accepted) == 1 and float(accepted[0].rsplit(" ", 1)[1]) > 0
