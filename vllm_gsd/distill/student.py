"""The student before training: some of the target's own layers, its embedding, and a trimmed vocabulary.

The target's layers are a far better start than random ones, and its embedding needs no training: a draft of two layers
reads as little memory a level as a much narrower model with a vocabulary of its own. Only the most frequent tokens'
rows of the LM head are computed (FR-Spec, Zhao et al. 2025); which ones is counted in the answers.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gsd.draft_vocab import write_draft_vocab

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
# The best draft of a rough search is a third vocabulary, two thirds layers.
VOCAB_SHARE = 1 / 3
LEAST_VOCAB = 2048


class StudentError(ValueError):
    """The target or the wanted size does not make a student; the message is one sentence."""


@dataclass(frozen=True)
class Shape:
    """What a student is made of: the target's ``layers`` by index, and ``vocab_size`` tokens of its LM head."""

    layers: tuple[int, ...]
    vocab_size: int


def target_config(target: Path) -> dict[str, Any]:
    """The target's config.json.

    Raises:
        StudentError: it is no Llama-like model's.
    """
    try:
        config: dict[str, Any] = json.loads((target / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StudentError(f"The target {str(target)!r} is no folder with a readable config.json.") from error
    missing = [key for key in ("num_hidden_layers", "hidden_size", "intermediate_size") if key not in config]
    if missing or config.get("model_type") not in ("llama", "mistral", "qwen2", "qwen3"):
        raise StudentError(
            f"The target {str(target)!r} is a {config.get('model_type')!r} model, but must be Llama-like "
            "(llama, mistral, qwen2 or qwen3)."
        )
    return config


def choose_shape(
    config: dict[str, Any],
    params: int | None = None,
    cost: float | None = None,
    layers: tuple[int, ...] | None = None,
    vocab_size: int | None = None,
) -> Shape:
    """A shape of about ``params`` parameters read a level, or of that share (``cost``) of the target's own.

    Raises:
        StudentError: the layers do not exist, or the size is below one layer.
    """
    count, hidden, vocabulary = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    if layers is not None and not all(0 <= layer < count for layer in layers):
        raise StudentError(f"Layers {list(layers)} were asked for, but the target has layers 0 to {count - 1}.")
    if vocab_size is not None and not 1 <= vocab_size <= vocabulary:
        raise StudentError(f"A vocabulary of {vocab_size} was asked for, but the target's has {vocabulary} tokens.")
    layer = layer_parameters(config)
    budget = params or round((cost or 0.1) * (count * layer + vocabulary * hidden))
    if layers is None:
        left = budget - hidden * (vocab_size or min(vocabulary, LEAST_VOCAB))
        wanted = min(count, round((budget - hidden * vocab_size if vocab_size else budget * (1 - VOCAB_SHARE)) / layer))
        if left < layer:
            raise StudentError(
                f"A student of {budget:,} parameters was asked for, but one layer and a vocabulary of "
                f"{vocab_size or LEAST_VOCAB} tokens have {layer + budget - left:,}."
            )
        layers = spread_layers(count, max(1, wanted))
    if vocab_size is None:
        vocab_size = min(vocabulary, max(LEAST_VOCAB, (budget - len(layers) * layer) // hidden // 256 * 256))
    return Shape(layers, vocab_size)


def layer_parameters(config: dict[str, Any]) -> int:
    """Weights of one decoder layer's matrices."""
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = head * config["num_attention_heads"]
    keys = head * (config.get("num_key_value_heads") or config["num_attention_heads"])
    return hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])


def spread_layers(count: int, wanted: int) -> tuple[int, ...]:
    """First layers, which read the text, and the last, which speaks the LM head's language."""
    return (*range(wanted - 1), count - 1) if wanted > 1 else (0,)


def rank_tokens(counts: np.ndarray, always: list[int]) -> np.ndarray:
    """Token ids, most frequent first: ``always`` (end of text, ...), then by ``counts`` [vocabulary], then by id.

    In a BPE vocabulary low ids are early merges, the frequent ones of the tokenizer's own corpus.
    """
    counts = counts.astype(np.float64)
    counts[always] = np.inf
    return np.lexsort((np.arange(len(counts)), -counts)).astype(np.int64)


def make_student(target: Path, out: Path, shape: Shape, ranking: np.ndarray) -> None:
    """Write the untrained student as a Hugging Face folder."""
    import torch

    config = target_config(target)
    out.mkdir(parents=True, exist_ok=True)
    tensors = _student_tensors(load_tensors(target), shape)
    config |= {"num_hidden_layers": len(shape.layers), "dtype": "bfloat16", "architectures": _architectures(config)}
    # Lists with one entry a layer (Qwen's attention kinds) shrink with the layers.
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = [kinds[layer] for layer in shape.layers]
    config.pop("quantization_config", None)
    save_tensors({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, out)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    write_draft_vocab(out, ranking[: shape.vocab_size])
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, out / name)


def _student_tensors(tensors: dict[str, torch.Tensor], shape: Shape) -> dict[str, torch.Tensor]:
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for new, old in enumerate(shape.layers):
        prefix = f"model.layers.{old}."
        kept |= {f"model.layers.{new}.{n[len(prefix) :]}": t for n, t in tensors.items() if n.startswith(prefix)}
    return kept


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder, of one file or of several.

    Raises:
        StudentError: there are none in safetensors format.
    """
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StudentError(f"The target {str(folder)!r} has no *.safetensors files.")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write them as ``model.safetensors``."""
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it 0600, the other files are readable to all


def _architectures(config: dict[str, Any]) -> list[str]:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return [f"{names[config['model_type']]}ForCausalLM"]
