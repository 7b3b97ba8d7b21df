"""The config key "cpu_kernels", and our CPU kernels without speculation."""

import itertools

import pytest
import torch
from engine_process import Engine, Params, model_runner, scheduler
from rounding import assert_close, generates

from vllm_gsd.cpu.linear import packs

BFLOAT16 = {"dtype": "bfloat16"}
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
OPTED_OUT = {**GREEDY, "extra_args": {"gsd": False}}
CHAINS = {"sources": ["draft"], "top_k": 1, "merge_ngram": 0}

ours_are_faster = pytest.mark.skipif(
    not packs(torch.empty(16, 2, dtype=torch.bfloat16)) or torch.cpu._is_amx_tile_supported(),
    reason="on this processor, vLLM's own matrix products are used",
)


def products(llm) -> dict[str, tuple[str, str, int]]:
    """The CPU matrix products of target and draft: by layer, their module and name, and the weight's dimensions."""
    runner = model_runner(llm)
    models = {"target": runner.model}
    if hasattr(runner, "drafter"):
        models["draft"] = runner.speculation.drafter.model.model
    return {
        f"{name} {path}": (module.cpu_linear.__module__, _name(module.cpu_linear), module.weight.dim())
        for name, model in models.items()
        for path, module in model.named_modules()
        if hasattr(module, "cpu_linear")
    }


def _name(product) -> str:
    return getattr(product, "__qualname__", type(product).__qualname__)


def count_rows(llm) -> None:
    """Start to count the target's rows that vLLM's and our attention kernel process; see ``rows_of``."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_gsd.engine.attention.cpu import TreeCPUAttentionImpl

    llm.rows = {"upstream": 0, "ours": 0, "ours without a branch": 0}
    upstream, ours = CPUAttentionBackendImpl.forward, TreeCPUAttentionImpl._tree

    def count_upstream(self, layer, query, key, value, kv_cache, metadata, *args, **kwargs):
        if metadata is not None and not layer.layer_name.startswith("draft_model"):
            llm.rows["upstream"] += len(query)
        return upstream(self, layer, query, key, value, kv_cache, metadata, *args, **kwargs)

    def count_ours(self, layer, query, kv_cache, tree, output):
        if not layer.layer_name.startswith("draft_model"):
            llm.rows["ours"] += len(query)
            starts = tree.query_start_loc.tolist()
            for begin, end in itertools.pairwise(starts):
                positions = tree.positions[begin:end].tolist()
                if positions == sorted(set(positions)):  # siblings share a position
                    llm.rows["ours without a branch"] += end - begin
        return ours(self, layer, query, kv_cache, tree, output)

    CPUAttentionBackendImpl.forward, TreeCPUAttentionImpl._tree = count_upstream, count_ours


def rows_of(llm) -> dict[str, int]:
    """The numbers of rows since the last call."""
    counted = dict(llm.rows)
    llm.rows.update(dict.fromkeys(counted, 0))
    return counted


def speculation(llm) -> dict:
    """The parts of an engine that speculation would change."""
    config = llm.llm_engine.vllm_config
    return {
        "config": config.speculative_config,
        "lookahead": config.num_lookahead_tokens,
        "scheduler": f"{type(scheduler(llm)).__module__}.{type(scheduler(llm)).__name__}",
        "runner": f"{type(model_runner(llm)).__module__}.{type(model_runner(llm)).__name__}",
        "async": config.scheduler_config.async_scheduling,
    }


@pytest.fixture(scope="module")
def off(start_engine):
    return start_engine({"cpu_kernels": "off"}, setup=(count_rows,), **BFLOAT16)


@pytest.fixture(scope="module")
def kernels_only(engine_pool, tiny_pair):
    """``kernels_only(dtype)`` starts an engine with our kernels and without speculation."""
    config = {"method": "gsd", "model": None, "sources": []}

    def start(dtype: str):
        def make():
            return Engine(tiny_pair.target, config, [count_rows], skip_tokenizer_init=True, dtype=dtype)

        return engine_pool.engine(f"kernels {dtype}", make)

    return start


def test_off_leaves_products_to_vllm(off, start_engine):
    theirs, ours = start_engine(None, **BFLOAT16).call(products), off.call(products)
    assert theirs and not any(module.startswith("vllm_gsd") for module, _, _ in ours.values())
    assert {name: made for name, made in ours.items() if name.startswith("target")} == theirs
    # The draft has the target's architecture, so its layers use the same products.
    assert {made for name, made in ours.items() if name.startswith("draft")} == set(theirs.values())


def test_off_is_plain_vllm_bit_for_bit_without_a_graph(off, start_engine, random_prompts):
    prompts = random_prompts(16, 5, 200)
    plain = start_engine(None, **BFLOAT16).generate(prompts, GREEDY)
    off.call(rows_of)
    assert off.generate(prompts, OPTED_OUT) == plain  # log-probabilities too
    assert off.call(rows_of)["ours"] == 0


@ours_are_faster
def test_auto_is_not_plain_vllm_bit_for_bit(start_engine, random_prompts):
    """A control for the test above: our products do round differently."""
    prompts = random_prompts(16, 5, 200)
    plain = start_engine(None, **BFLOAT16).generate(prompts, GREEDY)
    assert start_engine({}, **BFLOAT16).generate(prompts, OPTED_OUT) != plain


def test_off_attends_by_our_kernel_where_rows_branch_only(off, random_prompts):
    prompts = random_prompts(8, 5, 100)
    off.call(rows_of)
    off.generate(prompts, [GREEDY, OPTED_OUT] * 4)  # batches also have prompts and rows without a graph
    counted = off.call(rows_of)
    assert counted["ours"] > 0 and counted["ours without a branch"] == 0
    assert counted["upstream"] > sum(map(len, prompts))


def test_off_leaves_chains_to_vllm(start_engine, random_prompts):
    engine = start_engine({**CHAINS, "cpu_kernels": "off"}, setup=(count_rows,), **BFLOAT16)
    engine.generate(random_prompts(4), Params({"temperature": 0, "max_tokens": 24, "ignore_eos": True}))
    counted = engine.call(rows_of)
    assert counted["ours"] == 0 and counted["upstream"] > 0
    assert engine.metrics()["spec_decode_num_accepted_tokens"] > 10


def test_kernels_only_in_float32_is_plain_vllm(kernels_only, start_engine, random_prompts):
    engine, plain, prompts = kernels_only("float32"), start_engine(None), random_prompts(12, 5, 150)
    for params in ({**GREEDY, "max_tokens": 24}, {"temperature": 0.8, "seed": 3, "max_tokens": 24, "logprobs": 2}):
        assert engine.generate(prompts, params) == plain.generate(prompts, params)
    ours, theirs = engine.call(speculation), plain.call(speculation)
    assert ours == theirs and ours["config"] is None and ours["lookahead"] == 0
    assert not [name for name in engine.metrics() if "gsd" in name or "spec_decode" in name]


@ours_are_faster
def test_kernels_only_in_bfloat16(kernels_only, start_engine, random_prompts):
    """Weights are packed, our kernel attends most rows, and answers differ only by rounding."""
    engine, prompts = kernels_only("bfloat16"), random_prompts(16, 5, 200)
    made = engine.call(products)
    layers = {name for name in made if "embed_tokens" not in name}
    assert layers and all(made[name][0].startswith("vllm_gsd") and made[name][2] == 5 for name in layers)
    engine.call(rows_of)
    assert_close(start_engine(None, **BFLOAT16).generate(prompts, GREEDY), prompts, generates(engine, GREEDY))
    counted = engine.call(rows_of)
    assert counted["ours"] > counted["upstream"]
