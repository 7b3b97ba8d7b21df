"""A draft whose attention heads are twice as large as the target's, so that the two have different attention groups.

In heads of twice the size, every second frequency of the rotary embedding is one of the smaller heads'. The draft has
the target's queries and keys in those dimensions and zeros in the others, with queries scaled for the larger size. It
therefore computes the same function, up to added noise.
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
    """Convert a weight for heads of ``size`` to one for heads twice as large."""
    import torch

    half = torch.arange(size // 2)
    places = torch.cat([2 * half, size + 2 * half])  # in both halves of a larger head
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        heads = weight.view(-1, size, weight.shape[1])
        wide = weight.new_zeros(len(heads), 2 * size, weight.shape[1])
        wide[:, places] = heads * (2**0.5 if "q_proj" in name else 1.0)
        return wide.flatten(0, 1)
    if name.endswith("o_proj.weight"):
        return _widened("v_proj.weight", weight.T, size).T.contiguous()
    return weight
