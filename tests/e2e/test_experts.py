"""Mixtures of experts (Mixtral, Qwen3-MoE, Llama 4): tokens equal plain vLLM's, and measured costs are realistic."""

import contextlib

import pytest
import torch
from engine_process import Engine, draft_every_level, model_runner, run
from tiny_pair import VOCAB_SIZE

EXPERTS = 8
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
}
# The config class in transformers, and its own keys.
FAMILIES = {
    "Mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "Qwen3Moe": ("Qwen3MoeConfig", {"num_experts": EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    # All layers but the third attend within chunks. A chunk is as long as the longest text.
    "Llama4": (
        "Llama4TextConfig",
        {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 512,
            "no_rope_layers": [1, 1, 0],
            "floor_scale": 32,
        },
    ),
}
SAMPLING = [{"temperature": 0, "max_tokens": 30}, {"temperature": 0.8, "seed": 5, "max_tokens": 30}]


def build(folder, family):
    """A random target, and a draft that is also a mixture of experts and mostly agrees with it."""
    import transformers

    torch.manual_seed(3)
    name, keys = FAMILIES[family]
    config = getattr(transformers, name)(**{**SHAPE, **keys})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight += 0.02 * weight.std() * torch.randn_like(weight)
    model.config.attention_chunk_size = None
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def answers(engine, prompts):
    """Tokens of every prompt, greedy and seeded, one at a time and four at a time."""
    parts = [[prompt] for prompt in prompts[:2]] + [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
    return [run(engine, part, {**params, "ignore_eos": True}) for params in SAMPLING for part in parts]


def experts_of_idle_runs(llm, rows: list[int]) -> list[int]:
    """How many experts of the first layer are used by idle runs, whose durations are the planner's costs."""
    runner, used = model_runner(llm), []
    chosen = runner.model_config.hf_config.num_experts_per_tok
    gate = next(part for name, part in runner.model.named_modules() if name.endswith((".gate", ".router")))
    hook = gate.register_forward_hook(lambda _, __, out: used.append(out[0].topk(chosen).indices.unique().numel()))
    for count in rows:
        runner.run_idle(count)
    hook.remove()
    return used


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_vllm(tmp_path, family, random_prompts):
    target, draft = build(tmp_path, family)
    prompts = random_prompts(8, 10, 90)
    results = []
    for config in (None, {"method": "gsd", "model": str(draft), "num_speculative_tokens": 16}):
        setup = [draft_every_level] if config else []
        with contextlib.closing(Engine(target, config, setup, skip_tokenizer_init=True)) as engine:
            results.append(answers(engine, prompts))
            if config:
                chosen, counts = engine.call(experts_of_idle_runs, [1, 2, 8, 64]), engine.metrics()
    assert results[1] == results[0]
    assert counts["gsd_nodes_accepted_native"] > counts["gsd_target_steps"] / 5
    assert counts["gsd_kv_rows_moved"] > 20
    assert chosen[0] < chosen[1] < chosen[-1] == EXPERTS
