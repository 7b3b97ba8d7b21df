"""An EAGLE-style student: one decoder layer that reads the target's hidden states (Li et al. 2024).

At each position it reads the token and the target's hidden state before it, and predicts the target's next hidden
state. The target's LM head turns that into tokens. The student therefore starts from what the target knows of the text
and needs no embedding or LM head of its own. It is saved in EAGLE's format, which vLLM loads.

Below the first level of a graph, only the student's own hidden states exist. Training therefore runs the layer several
times over a text, each time on the hidden states of the previous pass. The attention of each pass sees exactly what a
node of that depth sees (the "training-time test" of EAGLE-3, Li et al. 2025).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from vllm_gsd.config.draft_vocab import choose_draft_vocab, read_draft_vocab
from vllm_gsd.tools.distill import student
from vllm_gsd.tools.distill.train import TrimmedStudent

if TYPE_CHECKING:
    from datasets import Dataset

    from vllm_gsd.tools.distill.hidden_states import Features

ARCHITECTURE = "EagleLlamaForCausalLM"
WEIGHTS = "model.safetensors"
# Levels of a graph in training, and the weight of each relative to the one before.
LEVELS, LEVEL_WEIGHT = 2, 0.8
# Randomly drawn tokens that represent the rest of the vocabulary beside the target's best tokens of a batch.
NEGATIVES = 2048
# Tokens and regularisation of the least-squares fit that initialises training.
FIT_TOKENS, FIT_RIDGE = 400_000, 1e-3
KEPT = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def eagle_config(target: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a student: one layer in the target's shape."""
    kept = {name: target[name] for name in KEPT if target.get(name) is not None}
    return {"architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1, **kept}


class EagleStudent(TrimmedStudent):
    """The student, its loss, and the target's embedding and LM head, which are not trained.

    Args:
        config: from ``eagle_config``.
        embedding, head: the target's, [vocabulary, hidden].
        token_ids: the trimmed vocabulary, int64 [n], ascending.
    """

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__(config["vocab_size"], token_ids)
        self.config = LlamaConfig(**config)
        hidden = self.config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        layer: Any = LlamaDecoderLayer(self.config, 0)
        layer.input_layernorm = nn.Identity()  # EAGLE's first layer has none
        # Initially the layer adds nothing, so the prediction is the least-squares fit.
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        self.layers = nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.register_buffer("embedding", embedding.to(torch.bfloat16), persistent=False)
        self.register_buffer("head", head[token_ids].to(torch.bfloat16), persistent=False)

    def levels(self, input_ids: torch.Tensor, features: torch.Tensor, count: int, first: int = 0) -> list[torch.Tensor]:
        """Predicted hidden states, [batch, length, hidden], of nodes at depth 0 (committed text), 1, ...

        Args:
            input_ids: int64 [batch, length].
            features: [batch, length, hidden], the target's hidden state before each token.
            first: levels after the first start at this position: [batch, length - first, hidden].
        """
        embedded = self.embedding[input_ids]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        turns = self.rotary(embedded, positions)
        known: list[tuple[torch.Tensor, torch.Tensor]] = []
        results: list[torch.Tensor] = []
        before = features.to(embedded.dtype)
        for level in range(count):
            hidden = self._layer(self.fc(torch.cat((embedded, before), dim=-1)), turns, known)
            results.append(hidden)
            before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
            if level == 0 and first:
                # A row reads the previous row of the previous level, so each later level needs one more position.
                start = max(0, first - max(0, count - 2))
                embedded, before = embedded[:, start:], before[:, start:]
                turns = tuple(turn[:, start:] for turn in turns)
        return results[:1] + [hidden[:, first - input_ids.shape[1] :] for hidden in results[1:]]

    def _layer(self, hidden: torch.Tensor, turns, known: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The decoder layer. ``known`` has the keys and values of earlier levels; those of this level are appended."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        layer: Any = self.layers[0]
        attention = layer.self_attn
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        query, key, value = (
            project(hidden).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = (tensor.to(value.dtype) for tensor in apply_rotary_pos_emb(query, key, *turns))
        known.append((key, value))
        mixed = attend_levels(query, known).transpose(1, 2).flatten(2)
        hidden = hidden + attention.o_proj(mixed)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def log_probs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``TrimmedStudent``. Uses the first level."""
        hidden = self.levels(batch["input_ids"], batch["features"], 1)[0]
        return self._log_probs(hidden.flatten(0, 1)[batch["rows"]], self.head)

    def _log_probs(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(functional.linear(hidden.to(head.dtype), head).float(), dim=-1)

    def forward(self, input_ids, attention_mask, features, rows, top_ids, top_logprobs) -> dict[str, torch.Tensor]:
        """The loss of ``Distillation.forward``, summed over levels with weights. ``features``: see ``levels``."""
        places = self.place[top_ids]
        weight = top_logprobs.exp().masked_fill(places < 0, 0.0)
        known = places.clamp(min=0)
        drawn = torch.randint(0, len(self.token_ids), (NEGATIVES,), device=known.device)
        chosen, index = torch.unique(torch.cat([known.flatten(), drawn]), return_inverse=True)
        index = index[: known.numel()].view_as(known)
        head = self.head[chosen]
        loss = torch.zeros((), device=known.device)
        length = input_ids.shape[1]
        line, position = rows // length, rows % length
        for level, hidden in enumerate(self.levels(input_ids, features, LEVELS, int(position.min()))):
            log_probs = self._log_probs(hidden[line, position - (length - hidden.shape[1])], head)
            loss = loss - LEVEL_WEIGHT**level * (weight * log_probs.gather(1, index)).sum() / len(rows)
        return {"loss": loss}


def attend_levels(query: torch.Tensor, known: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention of a level's rows to the text up to the node's root, and to the nodes in between.

    The row at position t of level n is a node n levels below its root. It attends to the text (level 0) up to t - n, to
    the row of level 1 at t - n + 1, and so on up to itself.

    Args:
        query: [batch, heads, rows, head_size] of level n. Its rows are the last positions of the text.
        known: keys and values, [batch, kv_heads, length, head_size] of level 0, [batch, kv_heads, rows,
            head_size] of levels 1 to n.

    Returns:
        [batch, heads, rows, head_size].
    """
    key, value = known[0]
    level, length, rows = len(known) - 1, key.shape[2], query.shape[2]
    if level == 0:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    group, scale = query.shape[1] // key.shape[1], 1 / math.sqrt(query.shape[3])
    place = torch.arange(length, device=query.device)
    text = (query @ key.repeat_interleave(group, 1).transpose(-1, -2)).float() * scale
    scores = [text.masked_fill(place > (place[length - rows :] - level)[:, None], -math.inf)]
    values = []
    for depth, (own_key, own_value) in enumerate(known[1:], start=1):
        own_key, own_value = (
            tensor.repeat_interleave(group, 1).roll(level - depth, 2) for tensor in (own_key, own_value)
        )
        score = (query * own_key).sum(-1, keepdim=True).float() * scale
        scores.append(score.masked_fill((place[:rows] < level - depth)[:, None], -math.inf))
        values.append(own_value)
    share = torch.softmax(torch.cat(scores, -1), -1).to(query.dtype)
    mixed = share[..., :length] @ value.repeat_interleave(group, 1)
    for depth, own_value in enumerate(values):
        mixed = mixed + share[..., length + depth, None] * own_value
    return mixed


# --- files ------------------------------------------------------------------------------------------


def make_start(target: Path, out: Path, ranking: np.ndarray, data: Dataset, features: Features) -> None:
    """Write the untrained student, a least-squares fit of the target's next hidden state."""
    config = eagle_config(student.target_config(target))
    embedding, head = target_ends(target)
    model = EagleStudent(config, embedding, head, torch.from_numpy(np.sort(ranking)))
    model.fc.weight.data.copy_(fit(embedding, data, features))
    save(model, config, out)
    student.write_draft_vocab(out, ranking)
    student.copy_tokenizer(target, out)


def fit(embedding: torch.Tensor, data: Dataset, features: Features) -> torch.Tensor:
    """Fit ``fc``, float32 [hidden, 2 * hidden]: it maps a token and the previous hidden state to the next one."""
    hidden = embedding.shape[1]
    products, wanted = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
    tokens = 0
    for row in data:
        own = features.of(row)[:-1]
        known = torch.cat((embedding[torch.from_numpy(row["input_ids"].astype(np.int64))][1:-1].float(), own[:-1]), -1)
        products += known.T @ known
        wanted += known.T @ own[1:]
        tokens += len(own)
        if tokens > FIT_TOKENS:
            break
    ridge = FIT_RIDGE * products.diagonal().mean() * torch.eye(2 * hidden)
    return torch.linalg.solve(products + ridge, wanted).T.contiguous()


def target_ends(target: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and LM head, [vocabulary, hidden] each."""
    tensors = student.load_tensors(target)
    embedding = tensors[student.EMBEDDING]
    return embedding, tensors.get("lm_head.weight", embedding)


def load(folder: Path, target: Path) -> EagleStudent:
    """Load a student in float32."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    token_ids = choose_draft_vocab(read_draft_vocab(folder), config["vocab_size"], None)
    if token_ids is None:
        token_ids = np.arange(config["vocab_size"])
    model = EagleStudent(config, *target_ends(target), torch.from_numpy(token_ids))
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}, strict=False)
    return model


def save(model: EagleStudent, config: dict[str, Any], out: Path) -> None:
    """Write the weights in bfloat16, and config.json."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def save_trained(model: EagleStudent, start: Path, out: Path) -> None:
    """As ``train.save_trained``."""
    making = out.with_suffix(".partial")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(start, making)
    save(model, json.loads((start / "config.json").read_text()), making)
    making.rename(out)
