"""The tiny target with quantised matrices, in the formats that vLLM's CPU kernels read."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # inputs that share a scale, where weights have 4 bits
# Of AWQ's words: which column the nibble at each place, lowest first, belongs to.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight numbers below 16 of the last dimension in an int32, the first one lowest."""
    words = (nibbles.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from 0 to 15, 8 for 0, in the weight's shape [outputs, inputs], and scales [outputs, inputs / GROUP]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7
    return (groups / scale.unsqueeze(2)).round().clamp(-8, 7).flatten(1) + 8, scale


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers, scale = four_bits(weight)
    return {"weight_packed": packed(numbers), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers, scale = four_bits(weight)
    zeros = torch.full_like(scale, 7)  # one less than the number for 0
    return {
        "qweight": packed(numbers).T.contiguous(),
        "qzeros": packed(zeros.T),
        "scales": scale.T.half().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers, scale = four_bits(weight)
    zeros = torch.full_like(scale, 8)
    return {
        "qweight": packed(numbers.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)),
        "qzeros": packed(zeros.T),
        "scales": scale.T.half().contiguous(),
    }


def _compressed(bits: int, form: str, weights: dict, inputs: dict | None) -> dict:
    number = {"num_bits": bits, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**number, "dynamic": False, **weights}}
    group["input_activations"] = inputs and {**number, **inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


# Not symmetric, because vLLM multiplies symmetric ones by another kernel on processors with AMX, in bfloat16 only.
INPUTS = {"strategy": "token", "dynamic": True, "symmetric": False}
# What becomes of a matrix, and what the model's configuration says of it.
FORMATS = {
    "int8": (int8, _compressed(8, "int-quantized", {"strategy": "channel"}, INPUTS)),
    "int4": (int4, _compressed(4, "pack-quantized", {"strategy": "group", "group_size": GROUP}, None)),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def quantised(target: Path, folder: Path, form: str) -> Path:
    """A copy of a model of Llama's kind with the matrices of its layers quantised; the embedding and head are kept."""
    quantise, config = FORMATS[form]
    shutil.copytree(target, folder)
    weights = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if weight.dim() < 2 or ".layers." not in name:
            weights[name] = weight
            continue
        parts = quantise(weight.float())
        weights.update({f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": config}))
    return folder
