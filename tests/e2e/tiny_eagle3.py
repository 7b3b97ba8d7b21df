"""EAGLE-3 heads for the tiny target: random, except for a fit to its hidden states that makes them often agree."""

import json
from pathlib import Path

import torch
from eagle3_files import layer_config, random_head, write_midlayer, write_speculators

HEADS = {  # architecture, config flags, and size of the draft vocabulary
    "llama": ("llama", {}, 400),
    "qwen3": ("qwen3", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}, 450),
    "midlayer": ("llama", {"norm_before_fc": True}, 512),  # EAGLE's own format, with the target's LM head
}


# Weight of greedy texts of random prompts in the fit. Those of the tests' own prompts have weight 1.
OTHERS = 0.05


def build_tiny_eagle3(target: Path, folder: Path, prompts: list[list[int]]) -> Path:
    """Build all HEADS in subfolders of ``folder``. They often agree with the target after ``prompts``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = json.loads((target / "config.json").read_text())
    torch.manual_seed(5)
    others = torch.randint(3, config["vocab_size"], (64, 8))
    texts = [_states(model, torch.tensor([prompt]), 40) for prompt in prompts] + [_states(model, others, 56)]
    weight = torch.cat([torch.full((len(text[0]), 1), 1.0 if len(text[0]) == 40 else OTHERS) for text in texts])
    states = *map(torch.cat, zip(*texts, strict=True)), weight
    for name, (shape, flags, drafted) in HEADS.items():
        torch.manual_seed(7)
        layer = layer_config(config, shape)
        tensors = _fitted(random_head(layer, flags, drafted), model, states, flags)
        write = write_midlayer if name == "midlayer" else write_speculators
        write(folder / name, tensors, layer, flags, target=target)
    return folder


@torch.no_grad()
def _states(model, prompts: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """For each token of greedy answers: three layers' states before it [n, 3, hidden], its embedding, and its state."""
    texts = model.generate(prompts, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0)
    last: list[torch.Tensor] = []
    with model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0])):
        output = model.model(texts, output_hidden_states=True)
    layers = torch.stack([*output.hidden_states[:2], last[0]], dim=2)
    embedded = model.model.embed_tokens(texts)
    answers = slice(prompts.shape[1], None)
    before = layers[:, prompts.shape[1] - 1 : -1]
    return before.flatten(0, 1), embedded[:, answers].flatten(0, 1), output.last_hidden_state[:, answers].flatten(0, 1)


@torch.no_grad()
def _fitted(tensors: dict, model, states: tuple[torch.Tensor, ...], flags: dict) -> dict[str, torch.Tensor]:
    """Fit the next hidden state to the layers' states and to the token's embedding, which attention copies."""
    layers, embedded, wanted, weight = states
    if flags.get("fc_norm"):
        layers = _norm(layers)
    layers = _norm(layers.flatten(1)) if flags.get("norm_before_fc") else layers.flatten(1)
    fit = torch.linalg.lstsq(weight * torch.cat([layers, _norm(embedded)], dim=1), weight * wanted).solution.T
    # Random embeddings differ, so a query attends to its own position. Four heads of size 32 share two KV heads, and
    # the first head of each pair passes on its half of the embedding.
    identity = torch.eye(64)
    queries = identity.view(2, 1, 32, 64).expand(-1, 2, -1, -1).reshape(128, 64)
    copies = fit[:, -64:].view(64, 2, 1, 32)
    fitted = {
        "fc": fit[:, :-64],
        "layers.0.self_attn.q_proj": torch.cat([1.7 * queries, torch.zeros(128, 64)], dim=1),
        "layers.0.self_attn.k_proj": torch.cat([1.7 * identity, torch.zeros(64, 64)], dim=1),
        "layers.0.self_attn.v_proj": torch.cat([identity, torch.zeros(64, 64)], dim=1),
        "layers.0.self_attn.o_proj": torch.cat([copies, torch.zeros_like(copies)], dim=2).reshape(64, 128),
        "embed_tokens": model.model.embed_tokens.weight,
    }
    if flags.get("norm_before_residual"):  # keep the scale that the fit expects for the residual
        tensors["layers.0.hidden_norm.weight"] *= (layers @ fit[:, :-64].T).square().mean().sqrt()
    noise = {f"{name}.weight": 0.2 * tensors[f"{name}.weight"] + weight for name, weight in fitted.items()}
    return {**tensors, **noise, "lm_head.weight": model.lm_head.weight[tensors["t2d"]]}


def _norm(states: torch.Tensor) -> torch.Tensor:
    return states * states.square().mean(-1, keepdim=True).rsqrt()
