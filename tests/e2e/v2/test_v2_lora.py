"""LoRA adapters on Model Runner V2: the texts of plain V2 with the same adapters."""

import pytest
from adapters import RANK, build_adapter, generate_adapted
from engine_process import Params

GSD = {"num_speculative_tokens": 6, "max_depth": 3}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 5}
# A slot more than adapters; see ``test_lora``.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "block_size": 32}


@pytest.fixture(scope="module")
def adapters(tiny_pair, tmp_path_factory):
    """Two of them, and none; the second changes the LM head too."""
    folder = tmp_path_factory.mktemp("adapters")
    return [*(build_adapter(folder / f"adapter{index}", tiny_pair.target, index) for index in range(2)), None]


def test_equals_plain_v2(start_v2, random_prompts, adapters):
    """Greedy and seeded, with and without adapters in one batch; then each prompt with another adapter."""
    plain, engine = start_v2(None, **LORA), start_v2(GSD, **LORA, async_scheduling=True)
    (long,) = random_prompts(1, 40, 41, seed=31)
    prompts, params = [long, long, *random_prompts(2, 5, 20, seed=32)], [GREEDY, GREEDY, SEEDED, GREEDY]
    first = [adapters[0], None, adapters[1], adapters[0]]
    for chosen, cached in ((first, 0), ([adapters[1], adapters[0], None, adapters[1]], 32)):
        asked = prompts, [Params(keys) for keys in params], chosen
        answers, expected = engine.call(generate_adapted, *asked), plain.call(generate_adapted, *asked)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        # The long prompt has been read with the first adapter and with none, so the second shares nothing.
        assert [answer.num_cached_tokens for answer in answers[:2]] == [0, cached]
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > 0 and metrics["gsd_kv_rows_moved"] > 0
    assert not any(name.startswith("gsd_fallbacks") for name in metrics)
