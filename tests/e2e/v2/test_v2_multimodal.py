"""A target that reads images, with M-RoPE, on Model Runner V2: tokens with graphs equal plain V2's."""

import contextlib

from engine_process import run
from tiny_images import OPTIONS, build, with_pictures, without_torchvision
from v2_engine import V2Engine

SAMPLING = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]


def test_equals_plain_v2(tmp_path, random_prompts):
    """Prompts have no, one or two images, and requests are greedy or seeded, alone or in a batch of four."""
    target, draft = build(tmp_path, "Qwen3-VL")
    texts, images = random_prompts(5, 20, 40), [[1], [], [2, 3], [4], [1]]
    prompts = [with_pictures("Qwen3-VL", text, own) for text, own in zip(texts, images, strict=True)]
    params = [{**SAMPLING[index % 2], "max_tokens": 8, "ignore_eos": True} for index in range(5)]
    config = {"method": "gsd", "model": str(draft), "num_speculative_tokens": 6, "max_depth": 2}
    results = []
    for gsd in (None, config):
        with contextlib.closing(V2Engine(target, gsd, first=(without_torchvision,), **OPTIONS)) as engine:
            results.append([run(engine, prompts[:1], params[:1]), run(engine, prompts[1:], params[1:])])
            counts = engine.metrics()
    assert results[1] == results[0]
    assert counts["gsd_nodes_accepted_native"] > 0 and counts["gsd_kv_rows_moved"] > 0
