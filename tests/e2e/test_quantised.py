"""Quantised targets with drafts quantised alike: answers equal plain vLLM's on the same target."""

import contextlib

import pytest
import torch
from engine_process import Engine, draft_every_level, run
from rounding import assert_close, generates
from tiny_quantised import quantised
from vllm.platforms import current_platform

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "seed": 5}
OFF = {"extra_args": {"gsd": False}}


@pytest.fixture
def start(tiny_pair, tmp_path):
    """``start(form, dtype, ignore)`` starts two engines for a quantised target: plain vLLM, and one with gsd.

    ``ignore`` names matrices of the draft that are not quantised.
    """
    with contextlib.ExitStack() as stack:

        def start(form: str, dtype: str, ignore: tuple[str, ...] = ()) -> list[Engine]:
            target = quantised(tiny_pair.target, tmp_path / "target", form)
            config = {"method": "gsd", "model": str(quantised(tiny_pair.draft, tmp_path / "draft", form, ignore))}
            engines = []
            for gsd, setup in ((None, []), (config, [draft_every_level])):
                engines.append(Engine(target, gsd, setup, skip_tokenizer_init=True, dtype=dtype))
                stack.callback(engines[-1].close)
            return engines

        yield start


def answers(engine, prompts, extra=None):
    """Greedy and seeded tokens for single prompts and for all at once."""
    every = [prompts[:1], prompts[1:2], prompts]
    return [run(engine, batch, {**params, **(extra or {})}) for params in (GREEDY, SEEDED) for batch in every]


def check_graphs(engine):
    metrics = engine.metrics()
    assert metrics["gsd_nodes_accepted_native"] > metrics["gsd_target_steps"] / 10
    assert metrics["gsd_kv_rows_moved"] > 10


def test_int8_equals_plain_vllm(start, random_prompts):
    """Sums of products of 8-bit integers are exact, so float32 answers equal plain vLLM's."""
    plain, gsd = start("int8", "float32", ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"))
    prompts = random_prompts(4)
    assert answers(gsd, prompts) == answers(plain, prompts)
    check_graphs(gsd)


@pytest.mark.parametrize("form", ["int4", "GPTQ", "AWQ"])
def test_int4(start, random_prompts, form):
    """vLLM 0.32's CPU kernel for 4-bit weights has no float32, so answers equal plain vLLM's only up to rounding."""
    current_platform.import_kernels()
    if not torch.cpu._is_avx512_supported() and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM has no AVX2 kernel for 4-bit weights, so plain vLLM cannot run them on this processor")
    plain, gsd = start(form, "bfloat16")
    prompts, params = random_prompts(4), {**GREEDY, "logprobs": 2}
    assert_close(plain.generate(prompts, params), prompts, generates(gsd, params))
    # With AMX, vLLM's kernels process all rows without a graph, so even the bits are equal.
    reference = plain if torch.cpu._is_amx_tile_supported() else gsd
    assert answers(gsd, prompts, OFF) == answers(reference, prompts)
    check_graphs(gsd)
