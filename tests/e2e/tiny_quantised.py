"""The tiny target with quantised matrices, in the formats that vLLM's CPU kernels read."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # number of inputs that share a scale in 4-bit formats
# The column of each nibble in a word of AWQ, lowest nibble first.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack each eight 4-bit numbers of the last dimension into an int32, the first one lowest."""
    words = (nibbles.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to numbers from 0 to 15 [outputs, inputs], where 8 means zero, and scales [outputs, inputs / GROUP]."""
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
    zeros = torch.full_like(scale, 7)  # GPTQ stores the zero point minus one
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


# Inputs are asymmetric, because with AMX vLLM uses another kernel for symmetric ones, which supports only bfloat16.
INPUTS = {"strategy": "token", "dynamic": True, "symmetric": False}
# The function that quantises a matrix, and the quantization config of the model.
FORMATS = {
    "int8": (int8, _compressed(8, "int-quantized", {"strategy": "channel"}, INPUTS)),
    "int4": (int4, _compressed(4, "pack-quantized", {"strategy": "group", "group_size": GROUP}, None)),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def quantised(target: Path, folder: Path, form: str, ignore: tuple[str, ...] = ()) -> Path:
    """A copy of a Llama model with quantised layers; embedding, LM head and ``ignore`` are not quantised."""
    quantise, config = FORMATS[form]
    if ignore:
        config = {**config, "ignore": [*config["ignore"], *ignore]}
    shutil.copytree(target, folder)
    weights = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if weight.dim() < 2 or ".layers." not in name or name.removesuffix(".weight") in ignore:
            weights[name] = weight
            continue
        parts = quantise(weight.float())
        weights.update({f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": config}))
    return folder
