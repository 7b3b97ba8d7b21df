"""Tiny random targets with a module for multi-token prediction (MTP) that is fitted to their hidden states."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_pair import LOGIT_SCALE, VOCAB_SIZE

SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "initializer_range": 0.12, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A kind of target: its classes in transformers and vLLM, and how its checkpoint names the module's tensors."""

    transformers: str
    vllm: str
    keys: dict
    copied: int  # the layer of the target that the module's layer is a copy of
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str | None
    hidden_first: bool = False  # whether the projection reads the hidden state before the embedding


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
FAMILIES = {
    "MiMo": Family(
        "Qwen2", "MiMoForCausalLM", {"hidden_size": 128}, 2, "model.mtp_layers.0.",
        "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm", hidden_first=True,
    ),
    "GLM": Family(
        "Glm4Moe", "Glm4MoeForCausalLM", {**EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, 2,
        "model.layers.3.", "model.layers.3.enorm", "model.layers.3.hnorm", "model.layers.3.eh_proj",
        "model.layers.3.shared_head.norm",
    ),
    "Ernie": Family(
        "Ernie4_5_Moe", "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_layer_start_index": 1}, 0,
        "model.mtp_block.0.", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None,
    ),
}  # fmt: skip


def build_tiny_mtp(folder: Path, name: str, prompts: list[list[int]]) -> Path:
    """Build a target of the family ``name`` in ``folder``, whose module often agrees with it after ``prompts``."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(4)
    config = getattr(transformers, f"{family.transformers}Config")(**{**SHAPE, **family.keys})
    model = getattr(transformers, f"{family.transformers}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight *= LOGIT_SCALE
    model.save_pretrained(folder)
    file = folder / "config.json"
    keys = {**json.loads(file.read_text()), "architectures": [family.vllm], "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(keys))
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **_module(model, weights, family, prompts)}, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def _module(
    model, weights: dict[str, torch.Tensor], family: Family, prompts: list[list[int]]
) -> dict[str, torch.Tensor]:
    """The module's tensors: a projection fitted to greedy texts, and a layer that adds little."""
    states = [_states(model, torch.tensor([prompt]), family) for prompt in prompts]
    read, wanted = map(torch.cat, zip(*states, strict=True))
    copied = f"model.layers.{family.copied}."
    module = {}
    for name, weight in weights.items():
        if name.startswith(copied):
            scale = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            module[family.layer + name.removeprefix(copied)] = scale * weight
    for norm in filter(None, (family.embedding_norm, family.hidden_norm, family.last_norm)):
        module[f"{norm}.weight"] = torch.ones(wanted.shape[1])
    module[f"{family.projection}.weight"] = torch.linalg.lstsq(read, wanted).solution.T.contiguous()
    return module


def _states(model, prompt: torch.Tensor, family: Family) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token of a greedy answer: what the projection reads [n, 2 * hidden], and the target's hidden state."""
    text = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    hidden = model.model(text).last_hidden_state[0, prompt.shape[1] - 1 :]
    embedded = model.model.embed_tokens(text[0, prompt.shape[1] :])
    read = [hidden[:-1], embedded] if family.hidden_first else [embedded, hidden[:-1]]
    return torch.cat([_norm(rows) for rows in read], dim=1), hidden[1:]


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return rows * rows.square().mean(dim=-1, keepdim=True).rsqrt()
