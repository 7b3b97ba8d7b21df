"""The sizes of a model, from its config.json and the headers of its weight files. It reads no weights."""

import json
from pathlib import Path
from typing import Any

from vllm_gsd.config.block_check import keys_of_layer
from vllm_gsd.config.draft_kind import read_text_config
from vllm_gsd.config.draft_tensors import in_mtp_module
from vllm_gsd.config.safetensors_files import stored_tensors
from vllm_gsd.tools.errors import ToolError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
FP8 = "fp8"  # of a KV cache only
# Other names of vLLM's for two of them.
DTYPE_NAMES = {"half": "float16", "float": "float32"}


def read_shape(folder: Path) -> dict[str, Any]:
    """The part of a config.json about the text model, or about the layer of a head in the speculators format.

    Raises:
        ToolError: the file is missing or is not a JSON object.
    """
    config = read_text_config(folder)
    if not config:
        raise ToolError(f"{folder / 'config.json'} is no readable JSON object, but must be a model's configuration.")
    return config.get("transformer_layer_config") or config


def weight_bytes(folder: Path, behind: int | None = None) -> int:
    """Bytes of a model's weights as stored; with ``behind``, only those of the MTP modules behind that many layers.

    Raises:
        ToolError: there are no safetensors files, or one is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"].values() if index.is_file() else ()
        files = sorted({folder / name for name in names} or folder.glob("*.safetensors"))
        tensors = stored_tensors(files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ToolError(f"The weights in {folder} cannot be read ({error}), but must be whole.") from None
    if not files:
        raise ToolError(f"{folder} has no safetensors files, but must hold the model's weights.")
    counted = [name for name in tensors if behind is None or in_mtp_module(name, behind)]
    return sum(tensors[name].end - tensors[name].start for name in counted)


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers. Some of Gemma's last layers read those of earlier ones.

    Raises:
        ToolError: the configuration lacks the sizes of the layers.
    """
    try:
        count = int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)
        layers = [keys_of_layer(config, index) for index in range(count)]
        heads = int(config["num_attention_heads"])
        numbers = sum(
            int(layer.get("num_key_value_heads") or heads) * int(layer.get("head_dim") or layer["hidden_size"] // heads)
            for layer in layers
        )
        return 2 * numbers * (1 if dtype == FP8 else DTYPE_BYTES[dtype])
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        raise ToolError("A config.json does not say how many layers and attention heads the model has.") from None


def computed_dtype(config: dict[str, Any], given: str) -> str:
    """The data type that vLLM computes in, given the ``dtype`` of its engine arguments.

    "auto" is that of the stored weights, but for float32.
    """
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = DTYPE_NAMES.get(given, given)
    return dtype if dtype in DTYPE_BYTES else "float16" if stored == "float16" else "bfloat16"
