"""The first weights of a block with fewer layers than the one that it is made from.

Every layer of a block reads the target's states with its own attention heads, and a block without some of them guesses
far worse. So the heads of a layer that goes are put beside those of the next one that stays, which then sees what the
layer before it wrote, but not what the layer that went wrote. A block has the same number of heads in all its layers.
Where some would be missing, there are copies of another layer's heads whose output is 0, for training to use.
"""

import torch

from vllm_gsd.tools.distill.students import layers_that_stay

ATTENTION = "layers.{}.self_attn.{}_proj.weight"


def merge_layers(weights: dict[str, torch.Tensor], depth: int, count: int) -> tuple[dict[str, torch.Tensor], int]:
    """Merge the layers of a block into ``count`` ones.

    Args:
        weights: of speculators' ``DSparkDraftModel`` with ``depth`` layers, without biases in attention.

    Returns:
        the new weights, and by what to multiply the numbers of query heads and of KV heads.
    """
    stay = layers_that_stay(depth, count)
    merged = {name: rows for name, rows in weights.items() if not name.startswith("layers.")}
    groups = [range(first + 1, last + 1) for first, last in zip([-1, *stay[:-1]], stay, strict=True)]
    times = max(map(len, groups))
    for number, own in enumerate(groups):
        last = own[-1]
        layers = [*own, *((last + step) % depth for step in range(1, times + 1 - len(own)))]  # the others are silent
        for name, rows in weights.items():
            if name.startswith(f"layers.{last}."):
                merged[name.replace(str(last), str(number), 1)] = rows
        norms = {layer: weights[f"layers.{layer}.input_layernorm.weight"] for layer in layers}
        # Queries read what the layer's norm gives. Keys and values read the target's states too, which have no norm.
        parts = {name: [weights[ATTENTION.format(layer, name)] for layer in layers] for name in "qkvo"}
        parts["q"] = [rows * (norms[layer] / norms[last]) for layer, rows in zip(layers, parts["q"], strict=True)]
        parts["o"] = [rows * (layer in own) for layer, rows in zip(layers, parts["o"], strict=True)]
        for name, each in parts.items():
            merged[ATTENTION.format(number, name)] = torch.cat(each, int(name == "o"))
    return merged, times
