"""Draft folders for a made-up target, each damaged in one way."""

import json

import pytest
from safetensors.torch import load_file, save_file

from vllm_gsd.config import GSDConfigError
from vllm_gsd.config.draft_check import check_draft

VOCAB = 96
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def write_target(folder):
    """Write a target's folder with only its config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder


def keys(**changed):
    """Damage that changes keys of config.json; None removes one. "a__b" is the key b in a."""

    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        for path, value in changed.items():
            *outer, last = path.split("__")
            part = config
            for name in outer:
                part = part[name]
            if value is None:
                del part[last]
            else:
                part[last] = value
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def tensors(**changed):
    """Damage that replaces tensors; None removes one."""

    def damage(folder):
        stored = {**load_file(folder / "model.safetensors"), **changed}
        kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")

    return damage


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def refusal(folder, target, **keys) -> str:
    """Check that a draft is refused with one sentence, and return it."""
    with pytest.raises(GSDConfigError) as refused:
        check_draft(str(folder), VOCAB, target, **keys)
    message = str(refused.value)
    assert message.startswith('"model" is') and message.endswith(".") and message.count(". ") == 0
    return message
