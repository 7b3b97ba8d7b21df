"""A draft for a tiny target whose attention heads have another size, so that the two are in unlike attention groups.

Of heads twice as large every second frequency of the rotary embedding is one of the smaller heads'. Queries and keys in
those dimensions, zeros in the others, and queries scaled for the larger size: the same function but for the noise.
"""

from pathlib import Path

from tiny_pair import NOISE, TinyPair


def build_unlike_pair(pair: TinyPair, folder: Path) -> TinyPair:
    """The target of ``pair``, and a draft with heads twice as large that mostly agrees with it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    config = LlamaConfig(**{**target.config.to_dict(), "head_dim": 2 * target.config.head_dim})
    draft = LlamaForCausalLM(config).float().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        weights = {name: _widened(name, weight, target.config.head_dim) for name, weight in target.state_dict().items()}
        draft.load_state_dict(weights)
        prompts = torch.randint(3, config.vocab_size, (4, 24))
        assert torch.allclose(draft(prompts).logits, target(prompts).logits, atol=1e-3)
        for weight in draft.parameters():
            if weight.dim() == 2:
                weight += NOISE * weight.std() * torch.randn_like(weight)
    draft.save_pretrained(folder / "unlike_draft")
    AutoTokenizer.from_pretrained(pair.target).save_pretrained(folder / "unlike_draft")
    return TinyPair(pair.target, folder / "unlike_draft", pair.eos)


def _widened(name: str, weight, size: int):
    """A weight of the target with heads of ``size`` as one of the draft with heads twice as large."""
    import torch

    half = torch.arange(size // 2)
    places = torch.cat([2 * half, size + 2 * half])  # in the first half of a larger head, and in its second
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        heads = weight.view(-1, size, weight.shape[1])
        wide = weight.new_zeros(len(heads), 2 * size, weight.shape[1])
        wide[:, places] = heads * (2**0.5 if "q_proj" in name else 1.0)
        return wide.flatten(0, 1)
    if name.endswith("o_proj.weight"):
        return _widened("v_proj.weight", weight.T, size).T.contiguous()
    return weight
