"""The first weights of a block student: a least-squares fit of what the target predicts.

From random weights a block first has to find out that the last known state matters most, which takes it a thousand
steps. The fit starts it there. It predicts the target's last state, normalised, from the token before and the target's
states before the anchor, both linearly. Attention then carries what the states tell, and the low-rank bias what the
token tells.
"""

from typing import Any, NamedTuple

import torch

from vllm_gsd.tools.distill.data import Answer, count_tokens
from vllm_gsd.tools.distill.packs import Packs, batches
from vllm_gsd.tools.distill.target import Target
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import thinned

# About how many answers are read, and how many of them at a time.
TEXTS, PACK = 384, 16
RIDGE = 0.02
# Random weights are kept at this size beside the fitted ones, so that training can tell them apart.
NOISE = 0.1
# The share of a head's rotary frequencies, fastest first, that tell near positions from far ones.
FAST = 0.75
# Attention scores of the nearest state: high enough for most of the attention to go to the last one.
SCORE = 32.0


class Fit(NamedTuple):
    """What the texts give."""

    from_token: torch.Tensor  # [hidden, hidden], the target's normalised last state from an embedding
    from_states: torch.Tensor  # [layers * hidden, hidden], the same from the states
    states: torch.Tensor  # [n, layers * hidden], a sample of states


def start_block(model: Any, target: Target, data: list[Answer], packs: Packs) -> None:
    """Set the first weights of speculators' DSpark model, which must be in float32 and on the target's device."""
    data = thinned(data, TEXTS)
    with torch.no_grad():
        fit = _fit(model, target, data, packs)
    with torch.no_grad(), target.norm.device:
        counts = torch.tensor(count_tokens(data, len(target.embedding))).float()
        _set_values(model, fit)
        _set_scores(model, target, fit, counts / counts.sum())
        _set_bias(model, target, fit, counts / counts.sum())


def _fit(model: Any, target: Target, data: list[Answer], packs: Packs) -> Fit:
    """Regress over places of the answers; each place stands for one depth of the block, near ones most often."""
    bounds = (1.0 / torch.arange(1, model.block_size + 1)).cumsum(0)
    hidden, sample = len(target.norm), []
    unit = 1.0 / target.embedding.std()
    size, count = hidden + model.fc.in_features, 0
    gram, right = target.norm.new_zeros(size, size), target.norm.new_zeros(size, hidden)
    for batch in batches(data, packs, PACK):
        # Padding between texts is not known, so no place is near the next text.
        known = batch["loss_mask"][0].unfold(0, model.block_size, 1).all(1)
        places = (known & (batch["position_ids"][0, : len(known)] > 0)).nonzero()[:, 0]
        depth = torch.bucketize(bounds[-1] * torch.rand(len(places)), bounds[:-1]).to(places.device)
        states = batch["hidden_states"][0, places - 1].float()
        inputs = torch.cat([unit * target.embedding[batch["input_ids"][0, places + depth]], states], 1)
        wanted = target.normalised(batch["verifier_last_hidden_states"][0, places + depth]).float()
        gram.addmm_(inputs.T, inputs)
        right.addmm_(inputs.T, wanted)
        count += len(inputs)
        sample.append(states[::8])
    if not count:
        raise ToolError(f"No answer is longer than the {model.block_size} tokens of a block; lower --depth.")
    gram.diagonal().add_(RIDGE * count)
    weights = torch.linalg.solve(gram, right)
    return Fit(unit * weights[:hidden], weights[hidden:], torch.cat(sample))


def _set_values(model: Any, fit: Fit) -> None:
    """Let the last layer's attention copy the principal components of what the states predict."""
    attention, hidden = model.layers[-1].self_attn, len(fit.from_token)
    rank = min(hidden, attention.v_proj.out_features)
    predicted = fit.states @ fit.from_states
    scale = float(predicted.square().mean().sqrt())  # of what the states predict
    components = torch.linalg.eigh(predicted.T @ predicted).eigenvectors[:, -rank:]
    rows = (fit.from_states @ components).T
    # The other features are random mixtures of the states, half as large together.
    mixed = torch.randn(hidden - rank, len(fit.from_states))
    mixed *= 0.5 * scale * (hidden / max(1, hidden - rank)) ** 0.5 / len(fit.from_states) ** 0.5
    model.fc.weight.copy_(torch.cat([rows, mixed]))
    size = (fit.states @ model.fc.weight.T).square().mean(1).sqrt().mean()
    for layer in model.layers:
        layer.self_attn.o_proj.weight.mul_(NOISE)
        layer.mlp.down_proj.weight.mul_(NOISE)
    attention.v_proj.weight.mul_(NOISE)
    attention.v_proj.weight[:rank] += torch.eye(rank, hidden)
    # Every head of a group adds its share of the group's components.
    width, group = attention.head_dim, attention.num_key_value_groups
    for head in range(attention.o_proj.in_features // width):
        part = components[:, head // group * width : (head // group + 1) * width]
        attention.o_proj.weight[:, head * width : head * width + part.shape[1]] += size / group * part
    model.norm.weight.fill_(scale)


def _set_scores(model: Any, target: Target, fit: Fit, frequency: torch.Tensor) -> None:
    """Let the last layer attend to the nearest state, and not to the block's own tokens."""
    layer = model.layers[-1]
    attention = layer.self_attn
    used = (frequency > 0).nonzero()[:, 0]
    weight = torch.cat([frequency[used], torch.ones(1)]).sqrt()[:, None]  # the last row is the unknown token's
    tokens = weight * layer.input_layernorm(target.embedding[torch.cat([used, torch.tensor([model.mask_token_id])])])
    states = model.hidden_norm(model.fc(fit.states)) / len(fit.states) ** 0.5
    ridge = 1e-3 * torch.eye(len(fit.from_token))
    of_tokens = tokens.T @ tokens
    query = torch.linalg.solve(of_tokens + ridge, tokens.T @ weight)[:, 0]
    aim = states.sum(0)[:, None] / len(fit.states) ** 0.5 - tokens.T @ weight
    key = torch.linalg.solve(states.T @ states + of_tokens + ridge, aim)[:, 0]
    # Rotary embedding turns the same vector in a query and a key by their distance.
    pattern = torch.zeros(attention.head_dim)
    pattern[: round(FAST * attention.head_dim / 2)] = 1.0
    for name, direction in (("q", query), ("k", key)):
        projection, norm = getattr(attention, f"{name}_proj"), getattr(attention, f"{name}_norm")
        heads = projection.out_features // attention.head_dim
        projection.weight.mul_(NOISE).add_(torch.outer(pattern.repeat(heads), direction))
        norm.weight.fill_((SCORE / attention.head_dim**0.5) ** 0.5)


def _set_bias(model: Any, target: Target, fit: Fit, frequency: torch.Tensor) -> None:
    """Let the low-rank bias tell what the token before tells: the best fit to its logits over the texts' tokens."""
    head, rank = model.lm_head.weight.float(), model.config.markov_rank
    predicted = target.embedding @ fit.from_token
    basis, triangle = torch.linalg.qr(head)
    logits = predicted @ triangle.T  # in that basis
    chosen = torch.linalg.eigh(logits.T @ (frequency[:, None] * logits)).eigenvectors[:, -rank:]
    before, after = logits @ chosen, basis @ chosen
    balance = (after.square().mean() / before.square().mean()).sqrt().sqrt()
    model.markov_head.markov_w1.weight.copy_(before * balance)
    model.markov_head.markov_w2.weight.copy_(after / balance)
