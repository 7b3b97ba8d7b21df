"""Prompts of 32,768 tokens: answers equal plain vLLM's, also with cached prefixes, and the plugin's tables stay small.

``python tests/e2e/test_long_context.py FOLDER`` writes the models, for measurements at other lengths.
"""

import contextlib
import sys
from pathlib import Path

import pytest
from engine_process import Engine, draft_every_level, model_runner, run
from tiny_pair import build_tiny_pair

LENGTH, ROOM = 32768, 512
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def build(folder):
    """Models with one layer and one KV head, because the cost of attention grows with the square of the length."""
    return build_tiny_pair(
        folder,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4 * LENGTH + ROOM,
    )


def own_bytes(llm):
    """Bytes of the NumPy arrays of speculation, drafter, the draft's KV tracker and planner, by attribute name."""
    import numpy as np

    ours = model_runner(llm).speculation
    arrays = {}
    for part in (ours, ours.drafter, ours.draft_kv, ours.planner):
        for name, value in vars(part).items():
            fields = value if isinstance(value, tuple) else [value]
            arrays[name] = sum(array.nbytes for array in fields if isinstance(array, np.ndarray))
    return arrays


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    pair = build(tmp_path_factory.mktemp("long"))
    options = {"max_model_len": LENGTH + ROOM, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28}
    config = {"method": "gsd", "model": str(pair.draft)}
    with contextlib.ExitStack() as stack:
        started = []
        for gsd, setup in ((None, []), (config, [draft_every_level])):
            started.append(Engine(pair.target, gsd, setup, skip_tokenizer_init=True, **options))
            stack.callback(started[-1].close)
        yield started


def test_equals_plain_vllm(engines, random_prompts):
    plain, gsd = engines
    (text,) = random_prompts(1, LENGTH, LENGTH)
    prompts = [text, text + text[100:130]]  # the second ends with a copy from near its start
    runs = []
    for prompt in prompts:
        before = gsd.metrics()
        runs.append((run(gsd, [prompt], GREEDY), gsd.metrics(), before))
        assert runs[-1][0] == run(plain, [prompt], GREEDY)
    (_, first, _), (_, second, before) = runs
    assert first["spec_decode_num_accepted_tokens"] > 5
    assert second["spec_decode_num_accepted_tokens"] > before["spec_decode_num_accepted_tokens"]
    assert first["gsd_draft_rows"] > LENGTH
    # The second prompt's prefix comes from the prefix cache, including the draft's keys and values.
    assert second["gsd_draft_rows"] - before["gsd_draft_rows"] < LENGTH / 20
    # If the draft has not read a text, and the text is too long to catch up on in one forward, the draft skips it.
    (unread,) = random_prompts(1, 6000, 6000, seed=1)
    run(gsd, [unread], {**GREEDY, "max_tokens": 1, "extra_args": {"gsd": False}})
    before = gsd.metrics()["gsd_draft_rows"]
    assert run(gsd, [unread + unread[:30]], GREEDY) == run(plain, [unread + unread[:30]], GREEDY)
    assert gsd.metrics()["gsd_draft_rows"] == before
    bytes_of = gsd.call(own_bytes)
    assert sum(bytes_of.values()) < 4 * LENGTH * 4, bytes_of  # less than vLLM's own table of token ids


if __name__ == "__main__":
    build(Path(sys.argv[1]))
