"""Block drafts for the tiny target, in the formats of public checkpoints.

A DSpark draft adds a bias that depends on the previous token. It is fitted to the tokens that follow in the target's
own text, so that many drafted tokens are accepted. All other weights are random and small.
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, RANK, MASK = 64, 2, 4, 2, 32, 48, 3
WINDOWS = {"layer_types": LAYERS * ["sliding_attention"], "sliding_window": 16, "use_sliding_window": True}
DEPTH = 3  # tokens of a block
MOST_OF_PAIRS = 4096  # the largest vocabulary for which a matrix of all pairs of tokens is built
# Drafts by name: kind and more arguments of ``build_tiny_block``.
BLOCKS = {
    "dspark": ("dspark", {}),
    "trimmed dspark": ("dspark", {"trimmed": True, "sample_from_anchor": False, "speculators": True}),
    "dflash2": ("dflash2", {}),
    "dflash2 of speculators": ("dflash2", {"speculators": True}),
    "dflash": ("dflash", {}),
    "dflash with windows": ("dflash", WINDOWS),
    "gemma4": ("dspark", {"gemma4": True}),
    "dflash of speculators": ("dflash", {"speculators": True}),
}


def _config(kind: str, vocab: int) -> dict:
    return {
        "architectures": [{"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}.get(kind, "Qwen3DSparkModel")],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def build_tiny_block(
    kind: str,
    target: Path,
    folder: Path,
    trimmed: bool = False,
    speculators: bool = False,
    gemma4: bool = False,
    **keys,
) -> Path:
    """Write a draft of ``kind`` ("dflash", "dflash2" or "dspark") to ``folder``.

    Args:
        trimmed: whether a DSpark draft has its own LM head with every second token of the vocabulary.
        speculators: whether to use the format of the speculators package instead of that of the draft's authors.
        gemma4: whether a DSpark draft has Gemma 4's architecture.
        keys: keys that are added to config.json or replace its keys.
    """
    torch.manual_seed(11)
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    weights = _backbone()
    config = _config(kind, vocab)
    if kind == "dspark":
        config |= {**own, "markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
        ids = torch.arange(0, vocab, 2) if trimmed else torch.arange(vocab)
        factors = factors_of_followers if vocab <= MOST_OF_PAIRS else codes_of_followers
        left, right = factors(target, vocab, ids)
        weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"] = left, right
        weights["confidence_head.proj.weight"] = 0.1 * torch.randn(1, HIDDEN + RANK)
        weights["confidence_head.proj.bias"] = torch.ones(1)
        if trimmed:
            config["draft_vocab_size"] = len(ids)
            weights["d2t"] = ids - torch.arange(len(ids))
            weights["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"][ids]
    else:
        config["dflash_config"] = own
    if gemma4:
        config |= {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "attention_k_eq_v": True}
        config |= {"layer_types": LAYERS * ["full_attention"], "final_logit_softcapping": 8.0}
        config |= {"global_head_dim": HEAD_DIM, "num_global_key_value_heads": KV_HEADS}
        weights = _as_gemma4(weights, load_file(target / "model.safetensors"))
    if kind == "dflash2":
        own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 6}
        weights |= _convolutions_and_selector(vocab)
    folder.mkdir(parents=True)
    config |= keys
    anchored = kind == "dspark" and keys.get("sample_from_anchor", True)
    config["block_size"] = DEPTH if anchored else 1 + DEPTH
    if speculators:
        config = as_speculators(kind, config, target)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def as_speculators(kind: str, config: dict, target: Path) -> dict:
    """Convert an author's config.json to the one that speculators 0.9.0 writes for the same draft."""
    from transformers import Qwen3Config

    inner = {**config, **config.pop("dflash_config", {})}
    layer = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    layer += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    kept = {key: inner[key] for key in inner if key not in (*layer, "target_layer_ids", "tie_word_embeddings")}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}
    return {
        **kept,
        "architectures": [{"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}.get(kind, "DFlash2DraftModel")],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in inner["target_layer_ids"]],
        "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]),
        "transformer_layer_config": Qwen3Config(**{key: inner[key] for key in layer if key in inner}).to_dict(),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
    }


def _backbone() -> dict[str, torch.Tensor]:
    def random(rows, columns):
        return 0.1 * torch.randn(rows, columns)

    keys_norm = 1 + 0.5 * torch.rand(HEAD_DIM)
    weights = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": 0.2 * torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "mlp.down_proj": (HIDDEN, 96),
        }
        norms = {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        norms |= {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        weights |= {f"layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        weights |= {f"layers.{layer}.{name}.weight": torch.ones(size) for name, size in norms.items()}
        # All layers share one norm, because on CPUs vLLM's own method uses the first layer's for all.
        weights[f"layers.{layer}.self_attn.k_norm.weight"] = keys_norm.clone()
    return weights


def _as_gemma4(weights: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys are also the values, layers have two more norms, and embedding and LM head are copies of the target's."""
    kept = {name: weight for name, weight in weights.items() if "v_proj" not in name}
    names = [
        f"layers.{layer}.{name}_feedforward_layernorm.weight" for layer in range(LAYERS) for name in ("pre", "post")
    ]
    ends = {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}
    return {**kept, **{name: torch.ones(HIDDEN) for name in names}, **ends}


def _convolutions_and_selector(vocab: int) -> dict[str, torch.Tensor]:
    weights = {
        "candidate_selector.predecessor_codebook": torch.randn(vocab, 16),
        "candidate_selector.successor_codebook": torch.randn(vocab, 16),
        "candidate_selector.hidden_projection.weight": torch.randn(16, HIDDEN),
    }
    for layer in range(LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            weights[f"layers.{layer}.{part}.base_kernel"] = torch.randn(2, 2, HIDDEN)
            weights[f"layers.{layer}.{part}.kernel_projection.weight"] = 0.1 * torch.randn(2 * 2 * 4, HIDDEN)
    return weights


def factors_of_followers(target: Path, vocab: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low-rank factors of a DSpark draft's bias for the tokens ``ids``, fitted to the target's text."""
    left, sizes, right = torch.linalg.svd(following(target, vocab)[:, ids])
    return left[:, :RANK] * sizes[:RANK], right[:RANK].T


def codes_of_followers(target: Path, vocab: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors for a vocabulary too large for a matrix of all pairs: a token favours the one that last followed it."""
    codes, before = torch.randn(vocab, RANK).sign(), torch.zeros(vocab, RANK)
    texts = greedy_texts(target, vocab)
    before[texts[:, :-1].flatten()] = codes[texts[:, 1:].flatten()]
    return before, codes[ids]


@cache
def greedy_texts(target: Path, vocab: int) -> torch.Tensor:
    """The target's texts [128, 36] after random prompts of 6 tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = torch.randint(3, vocab, (128, 6))
    return model.generate(prompts, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)


@cache
def following(target: Path, vocab: int) -> torch.Tensor:
    """Logits [vocab, vocab] of the token after each token, from the target's greedy text."""
    from transformers import AutoModelForCausalLM

    model, texts = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), greedy_texts(target, vocab)
    with torch.no_grad():
        logits = model(texts).logits
    total, count = torch.zeros(vocab, vocab), torch.zeros(vocab, 1)
    before = texts.flatten()
    total.index_add_(0, before, logits.flatten(0, 1))
    count.index_add_(0, before, torch.ones(len(before), 1))
    return total / count.clamp(min=1)
