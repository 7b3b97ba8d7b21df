"""The student before training: a narrow Llama with the target's embedding projected, or some of the target's layers.

A narrow student reads little memory per level. Its embedding is the target's, projected onto its main directions, so
similar tokens are similar from the start. The LM head computes only the rows of the most frequent tokens in the answers
(FR-Spec, Zhao et al. 2025).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gsd.config.draft_vocab import write_draft_vocab

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
EMBEDDING = "model.embed_tokens.weight"
# The number of layers, the head size and the width step of a narrow student.
DEPTH, HEAD_SIZE, WIDTH_STEP = 4, 32, 64


class StudentError(ValueError):
    """The target or the requested size is unsuitable. The message is one sentence."""


@dataclass(frozen=True)
class Shape:
    """The size of a student.

    It has either the target's ``layers`` (by index) or ``depth`` narrow layers of ``width``. Its LM head computes
    ``vocab_size`` tokens.
    """

    width: int
    depth: int
    vocab_size: int
    layers: tuple[int, ...] = ()

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward part of a narrow layer."""
        return -(-10 * self.width // 3 // 64) * 64

    def layer_parameters(self) -> int:
        """The number of weights in the matrices of one narrow layer."""
        return self.width * (2 * self.width + 2 * self.kv_heads * HEAD_SIZE + 3 * self.feed_forward)

    @property
    def kv_heads(self) -> int:
        """KV heads of a narrow layer: at most a third of its heads."""
        heads = self.width // HEAD_SIZE
        return max(count for count in range(1, heads // 3 + 1) if heads % count == 0) if heads >= 3 else 1


def target_config(target: Path) -> dict[str, Any]:
    """The target's config.json.

    Raises:
        StudentError: it cannot be read, or the model is not Llama-like.
    """
    try:
        config: dict[str, Any] = json.loads((target / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StudentError(f"The target {str(target)!r} is no folder with a readable config.json.") from error
    if config.get("model_type") not in LLAMA_LIKE:
        allowed = ", ".join(LLAMA_LIKE)
        raise StudentError(
            f"The target {str(target)!r} is a {config.get('model_type')!r} model, but must be Llama-like ({allowed})."
        )
    return config


def choose_shape(config: dict[str, Any], params: int | None, cost: float | None, vocab_size: int) -> Shape:
    """The widest narrow student with at most ``params`` parameters, or at most ``cost`` relative to the target's step.

    The cost of a step is the number of parameters that it reads: all of the target's, and the student's layers and
    ``vocab_size`` rows of its LM head. Its embedding is only looked up.

    Raises:
        StudentError: even the narrowest student is larger.
    """
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    vocab_size = min(vocab_size, vocabulary)
    best = None
    for width in range(WIDTH_STEP, hidden + 1, WIDTH_STEP):
        shape = Shape(width, DEPTH, vocab_size)
        layers = DEPTH * shape.layer_parameters()
        if params is not None:
            fits = layers + vocabulary * width <= params
        else:
            fits = layers + vocab_size * width <= (cost or 0.0) * target_parameters(config)
        if fits:
            best = shape
    if best is None:
        wanted = f"{params:,} parameters" if params is not None else f"a cost of {cost}"
        raise StudentError(f"A student of {wanted} was asked for, but one of width {WIDTH_STEP} is larger already.")
    return best


def target_parameters(config: dict[str, Any]) -> int:
    """The number of weights that a step of the target reads."""
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = head * config["num_attention_heads"]
    keys = head * (config.get("num_key_value_heads") or config["num_attention_heads"])
    layer = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    return config["num_hidden_layers"] * layer + config["vocab_size"] * hidden


def layers_shape(config: dict[str, Any], layers: tuple[int, ...], vocab_size: int) -> Shape:
    """The shape of a student made of layers of the target.

    Raises:
        StudentError: the target lacks one of the layers.
    """
    count = config["num_hidden_layers"]
    if not layers or not all(0 <= layer < count for layer in layers):
        raise StudentError(f"Layers {list(layers)} were asked for, but the target has layers 0 to {count - 1}.")
    return Shape(config["hidden_size"], len(layers), min(vocab_size, config["vocab_size"]), layers)


def rank_tokens(counts: np.ndarray, always: list[int]) -> np.ndarray:
    """Token ids, most frequent first: ``always`` (such as end of text), then by ``counts`` [vocabulary], then by id.

    In a BPE vocabulary, low ids are early merges and therefore frequent in the tokenizer's corpus.
    """
    order = counts.astype(np.float64)
    order[always] = np.inf
    return np.lexsort((np.arange(len(order)), -order)).astype(np.int64)


def make_student(target: Path, out: Path, shape: Shape, ranking: np.ndarray, seed: int) -> None:
    """Write the untrained student as a Hugging Face folder."""
    config = target_config(target)
    out.mkdir(parents=True, exist_ok=True)
    if shape.layers:
        _from_layers(target, config, shape).save_pretrained(out)
    else:
        _narrow(target, config, shape, seed).save_pretrained(out)
    write_draft_vocab(out, ranking[: shape.vocab_size])
    copy_tokenizer(target, out)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the files of the tokenizer."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _from_layers(target: Path, config: dict[str, Any], shape: Shape) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = AutoConfig.from_pretrained(target)
    own.num_hidden_layers = shape.depth
    if isinstance(kinds := config.get("layer_types"), list):  # one entry a layer
        own.layer_types = [kinds[layer] for layer in shape.layers]
    own.quantization_config = None
    student = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    weights = {}
    for name, tensor in load_tensors(target).items():
        parts = name.split(".")
        if ".layers." not in name:
            weights[name] = tensor
        for new, old in enumerate(shape.layers):
            if parts[:3] == ["model", "layers", str(old)]:
                weights[".".join(["model", "layers", str(new), *parts[3:]])] = tensor
    student.load_state_dict(weights, strict=False)
    return student


def _narrow(target: Path, config: dict[str, Any], shape: Shape, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "rms_norm_eps")
    own = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.width // HEAD_SIZE,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_SIZE,
        tie_word_embeddings=True,
        **{name: config[name] for name in kept if name in config},
    )
    student = LlamaForCausalLM(own)
    embedding = project(load_tensors(target)[EMBEDDING].float(), shape.width)
    embedding *= own.initializer_range / embedding.std()
    student.get_input_embeddings().weight.data.copy_(embedding)
    return student


def project(embedding: torch.Tensor, width: int) -> torch.Tensor:
    """The embedding [vocabulary, hidden] projected onto its ``width`` main directions."""
    import torch

    values, directions = torch.linalg.eigh(embedding.T @ embedding)
    return embedding @ directions[:, values.argsort(descending=True)[:width]]


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder.

    Raises:
        StudentError: the folder has no safetensors files.
    """
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StudentError(f"The target {str(folder)!r} has no *.safetensors files.")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
