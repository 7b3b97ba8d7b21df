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
    before = [-1, *stay[:-1]]
    times = max(last - first for first, last in zip(before, stay, strict=True))
    for number, (first, last) in enumerate(zip(before, stay, strict=True)):
        own = list(range(first + 1, last + 1))
        silent = [(last + step) % depth for step in range(1, times + 1 - len(own))]
        prefix = f"layers.{last}."
        merged |= {
            f"layers.{number}.{name.removeprefix(prefix)}": rows
            for name, rows in weights.items()
            if name.startswith(prefix)
        }
        norms = {layer: weights[f"layers.{layer}.input_layernorm.weight"] for layer in own + silent}
        # Queries read what the layer's norm gives. Keys and values read the target's states too, which have no norm.
        queries = [weights[ATTENTION.format(layer, "q")] * (norms[layer] / norms[last]) for layer in own + silent]
        merged[ATTENTION.format(number, "q")] = torch.cat(queries)
        for name in "kv":
            merged[ATTENTION.format(number, name)] = torch.cat(
                [weights[ATTENTION.format(layer, name)] for layer in own + silent]
            )
        outputs = [weights[ATTENTION.format(layer, "o")] * (layer in own) for layer in own + silent]
        merged[ATTENTION.format(number, "o")] = torch.cat(outputs, 1)
    return merged, times
