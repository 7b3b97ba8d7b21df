"""Drafts that people own on V2: the chains of vLLM's own methods step by step, and plain V2's output."""

import shutil

import numpy as np
import pytest
import torch
from draft_records import name_layers_apart, record_drafts, recorded_drafts
from engine_process import run
from hard_requests import SCARCE, ask, check_counts, hard_prompts
from safetensors.torch import load_file, save_file
from step_watch import report, watch_steps
from tiny_blocks import BLOCKS, DEPTH
from tiny_eagle3 import HEADS
from v2_engine import V2Engine

from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.speculators_students import BlockStudent
from vllm_gsd.tools.distill.target import Target

CHAIN = {"sources": ["draft"], "top_k": 1, "max_depth": DEPTH, "num_speculative_tokens": DEPTH, "budget": DEPTH}
CHAIN |= {"theta_prob": 0.0, "theta_sib": 0.0, "merge_ngram": 0}
GRAPH = {**CHAIN, "top_k": 2, "num_speculative_tokens": 14, "budget": 14}  # with every path of two candidates a depth
ENGINE = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "max_model_len": 128, "block_size": 32}
ENGINE |= {"skip_tokenizer_init": False}
# DFlash2's convolutions span as many rows as are drafted.
KINDS = ["dspark", "trimmed dspark", "dflash2 of speculators", "dflash with windows", "gemma4", "qwen3"]
# Chains of other heads are compared on V1; two ranks have the trimmed block (test_v2_parallel.py).
MORE = ["dflash of speculators", "midlayer"]


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return hard_prompts(random_prompts)


@pytest.fixture(scope="module")
def expected(text_pair, prompts):
    plain = V2Engine(text_pair.target, None, **ENGINE)
    tokens = ask(plain, prompts, 12)
    plain.close()
    return tokens


@pytest.fixture(scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def draft(kind, tiny_blocks, tiny_eagle3):
    return str(tiny_eagle3 / kind if kind in HEADS else tiny_blocks[kind])


@pytest.fixture(scope="module")
def graph(text_pair, draft):
    engine = V2Engine(text_pair.target, {"method": "gsd", "model": draft, **GRAPH}, **{**ENGINE, **SCARCE})
    yield engine
    engine.close()


def drafted(engine, prompt):
    """Tokens of a prompt alone, and what was drafted for it at each step."""
    engine.call(record_drafts)
    (tokens,) = run(engine, [prompt], {"temperature": 0, "max_tokens": 16, "ignore_eos": True})
    return tokens, engine.call(recorded_drafts)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_same_head_same_chain(text_pair, graph, draft, kind, prompts):
    """With one candidate, vLLM's drafts and steps; with more, no more steps. The last drafts are shorter here."""
    method = "eagle3" if kind in HEADS else BLOCKS[kind][0].rstrip("2")
    found = []
    for config in {"method": method, "num_speculative_tokens": DEPTH}, {"method": "gsd", **CHAIN}:
        first = (name_layers_apart,) if kind == "gemma4" else ()
        engine = V2Engine(text_pair.target, {**config, "model": draft}, first=first, **ENGINE)
        found.append(drafted(engine, prompts[0]))
        engine.close()
    (tokens, theirs), (ours_tokens, ours) = found
    assert ours_tokens == tokens
    assert len(ours) == len(theirs)
    assert ours[: -DEPTH - 1] == theirs[: -DEPTH - 1] and len(ours) > DEPTH + 1
    more_tokens, more = drafted(graph, prompts[0])
    assert more_tokens == tokens
    assert len(more) <= len(ours)


def test_a_distilled_block_is_loaded_by_vllm(text_pair, prompts, tmp_path):
    """Whatever its weights are, vLLM's own method drafts the same chains from the folder as gsd."""
    options = Options(target=str(text_pair.target), depth=DEPTH, rank=16, vocab_size=400)
    student = BlockStudent.make(options, Target(text_pair.target), np.arange(512))
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in student.model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=random)
    student.scale = torch.rand(student.scale.shape, generator=random) + 0.5
    student.save(tmp_path)
    found = []
    for config in {"method": "dspark", "num_speculative_tokens": DEPTH}, {"method": "gsd", **CHAIN}:
        engine = V2Engine(text_pair.target, {**config, "model": str(tmp_path)}, **ENGINE)
        found.append(drafted(engine, prompts[0]))
        engine.close()
    (tokens, theirs), (ours_tokens, ours) = found
    assert ours_tokens == tokens and len(ours) == len(theirs) > DEPTH + 1
    assert ours[: -DEPTH - 1] == theirs[: -DEPTH - 1]


@pytest.mark.parametrize("kind", [kind for kind in KINDS + MORE if kind != "trimmed dspark"], indirect=True)
def test_equals_plain_v2(graph, kind, prompts, expected):
    assert ask(graph, prompts, 12) == expected
    check_counts(graph.metrics(), levels=kind in HEADS)


@pytest.mark.parametrize("kind", ["dspark", "gemma4"], indirect=True)
def test_context_as_on_gpus(text_pair, draft, kind, prompts, tmp_path):
    """vLLM's kernels write the keys and values of all layers at once: the same drafts, and few launches."""
    shutil.copytree(draft, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    norm = weights["layers.1.self_attn.k_norm.weight"]
    norm *= torch.linspace(0.2, 3, len(norm))  # layers are alike otherwise
    save_file(weights, tmp_path / "model.safetensors")
    options = {**ENGINE, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    found = []
    for more in {}, {"gpu_attention": True, "cuda_graphs": True, "async_scheduling": True}:
        engine = V2Engine(text_pair.target, {"method": "gsd", "model": str(tmp_path), **GRAPH}, **more, **options)
        found.append(drafted(engine, prompts[0]))
        if more:
            engine.call(watch_steps, True)
            run(engine, prompts[:1], {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
            watched = engine.call(report)
        engine.close()
    assert found[0] == found[1]
    assert watched["outside_graphs"] <= 60 and watched["draft_phase_beside_model"] <= 60
