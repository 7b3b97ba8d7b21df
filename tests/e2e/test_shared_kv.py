"""Targets whose last layers read the KV cache of earlier layers (Gemma 3n, Gemma 4): tokens equal plain vLLM's."""

import contextlib

import pytest
import torch
from engine_process import Engine, draft_every_level, run
from tiny_pair import VOCAB_SIZE

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 128,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 64,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Family in transformers, and the keys that only it has.
FAMILIES = {"Gemma3n": {"laurel_rank": 8, "activation_sparsity_pattern": None}, "Gemma4": {"global_head_dim": 32}}


SAMPLING = [
    {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
    {"temperature": 0.8, "seed": 5, "max_tokens": 20, "ignore_eos": True},
]


def build(folder, family):
    """A random target whose last two layers share KV, and a similar draft that mostly agrees with it."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}TextConfig")(**SHAPE, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += 0.04 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_vllm(tmp_path, family, random_prompts, tiny_pair):
    """One draft shares KV too. For Gemma 3n, another, unrelated draft proposes tokens that make the target give NaN."""
    target, draft = build(tmp_path, family)
    prompts = random_prompts(8, 10, 90)
    answers, moved = [], []
    for model in (None, draft, *([tiny_pair.draft] if family == "Gemma3n" else [])):
        config = {"method": "gsd", "model": str(model), "num_speculative_tokens": 16}
        with contextlib.closing(
            Engine(target, config if model else None, [draft_every_level] if model else [], skip_tokenizer_init=True)
        ) as engine:
            parts = prompts[:1], prompts[1:5], prompts
            answers.append([run(engine, part, params) for params in SAMPLING for part in parts])
            moved.append(engine.metrics().get("gsd_kv_rows_moved"))
    assert moved[1] > 50 and all(moved[1:])
    assert all(answer == answers[0] for answer in answers[1:])


def test_a_chain_of_tokens_that_give_nan(tmp_path, random_prompts, tiny_pair):
    """A step without branches goes to vLLM's attention, which multiplies what a row does not attend by 0."""
    from transformers import AutoModelForCausalLM

    target, _ = build(tmp_path, "Gemma3n")
    draft = AutoModelForCausalLM.from_pretrained(tiny_pair.draft)
    with torch.no_grad():
        draft.lm_head.weight[1:] = 0  # it often proposes the padding token
    draft.save_pretrained(tmp_path / "padding")
    config = {"method": "gsd", "model": str(tmp_path / "padding"), "num_speculative_tokens": 1, "sources": ["draft"]}
    prompts, answers = random_prompts(4, 10, 90), []
    for options in ((), (config, [draft_every_level])):
        with contextlib.closing(Engine(target, *options, skip_tokenizer_init=True)) as engine:
            answers.append([run(engine, prompts, params) for params in SAMPLING])
            verified = engine.metrics().get("gsd_nodes_verified")
    assert verified > 0
    assert answers[0] == answers[1]
