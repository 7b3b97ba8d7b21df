"""A tiny random target and a draft that mostly agrees with it; building them takes a second."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 512
# Noise on the draft's weights, relative to each matrix's standard deviation. The draft then often agrees with the
# target, but not always.
NOISE = 0.08
# Probabilities of a random model are nearly uniform. This factor makes them as uneven as a trained model's.
LOGIT_SCALE = 5.0


@dataclass(frozen=True)
class TinyPair:
    """Folders of the two models, with a tokenizer of one word per token."""

    target: Path
    draft: Path
    eos: int  # a token that occurs in greedy text


def build_tiny_pair(
    folder: Path, vocab_size: int = VOCAB_SIZE, logit_scale: float = LOGIT_SCALE, **shape: int
) -> TinyPair:
    """Build the pair in ``folder``; ``shape`` replaces fields of the configuration below."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.12,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = LlamaConfig(**{**config, **shape})
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight *= logit_scale
    eos = _common_token(model)
    model.config.eos_token_id = eos
    model.generation_config.eos_token_id = eos
    pair = TinyPair(folder / "target", folder / "draft", eos)
    model.save_pretrained(pair.target)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += NOISE * weight.std() * torch.randn_like(weight)
    model.save_pretrained(pair.draft)
    for path in (pair.target, pair.draft):
        _write_tokenizer(path, vocab_size, eos)
    return pair


def _common_token(model) -> int:
    """A token that occurs in the middle of many greedy continuations; the pair uses it as EOS."""
    import torch

    prompts = torch.randint(3, model.config.vocab_size, (32, 12))
    texts = model.generate(prompts, max_new_tokens=32, do_sample=False)[:, 12:].tolist()
    counts = Counter(token for text in texts for token in set(text[8:]) - set(text[:8]))
    return counts.most_common(1)[0][0]


def _write_tokenizer(folder: Path, vocab_size: int, eos: int) -> None:
    words = [f"w{index}" for index in range(vocab_size)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(words)}, "unk_token": "w2"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": words[eos]}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
