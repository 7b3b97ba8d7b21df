"""LoRA adapters for the tiny target, and requests that use them."""

import json
from pathlib import Path

RANK = 8
# Standard deviation of an adapter's changes, relative to that of the weights. It is small enough that the draft, which
# has no adapter, still predicts the target well.
STRENGTH = 0.15


def build_adapter(folder: Path, target: Path, seed: int) -> Path:
    """Write a random adapter for all linear layers of ``target``; with an odd seed it also changes the LM head."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    config = json.loads((target / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    deviations = dict.fromkeys(shapes, config["initializer_range"])
    if seed % 2:
        shapes["lm_head"] = (hidden, config["vocab_size"])
        deviations["lm_head"] = 5 * config["initializer_range"]  # see tiny_pair.LOGIT_SCALE
    weights = {}
    for name, (inputs, outputs) in shapes.items():
        scale = STRENGTH * deviations[name] / RANK**0.5
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=random)
        weights[f"base_model.model.{name}.lora_B.weight"] = scale * torch.randn(outputs, RANK, generator=random)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-1] for name in shapes})
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def generate_adapted(llm, prompts, params, adapters):
    """Generate answers, in the engine's process, to prompts (token ids or vLLM's dicts) with their adapters.

    Args:
        params: a list of ``Params``, one for each prompt.
        adapters: each prompt's adapter folder, or None.
    """
    from engine_process import _answer
    from vllm.lora.request import LoRARequest

    folders = sorted({folder for folder in adapters if folder})
    requests = {folder: LoRARequest(folder.name, 1 + int(folder.name[-1]), str(folder)) for folder in folders}
    outputs = llm.generate(
        [prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt} for prompt in prompts],
        [one.build() for one in params],
        lora_request=[requests.get(folder) for folder in adapters],
        use_tqdm=False,
    )
    return [_answer(output) for output in outputs]
