"""What training needs of the target: its configuration, and its predictions from the states of its last layer."""

import shutil
from pathlib import Path
from typing import Any

import torch

from vllm_gsd.config.draft_kind import read_config
from vllm_gsd.config.source import shown
from vllm_gsd.tools.errors import ToolError

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
# States whose logits are in memory at the same time.
AT_ONCE = 1024


def check_target(folder: Path) -> dict[str, Any]:
    """The target's config.json.

    Raises:
        ToolError: the model is not Llama-like, or has no readable config.json with its sizes or no
            safetensors files of the usual names.
    """
    if not (config := read_config(folder)):
        raise ToolError(f"The target {str(folder)!r} has no readable config.json; give a folder, not a hub id.")
    if (kind := config.get("model_type")) not in LLAMA_LIKE:
        raise ToolError(f"The target {str(folder)!r} is a {kind!r} model, but must be one of {', '.join(LLAMA_LIKE)}.")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in sizes:
        if not isinstance(size := config.get(name), int) or size < 1:
            raise ToolError(f'In the target {str(folder)!r}, "{name}" is {shown(size)}, but must be above 0.')
    # Other names are known to vLLM only, and not to transformers.
    files = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in files):
        raise ToolError(f"The target {str(folder)!r} has neither {' nor '.join(files)}.")
    return config


class Target:
    """A Llama-like target's folder, and the weights that turn states into tokens.

    ``embedding`` and ``head`` are [vocabulary, hidden], ``norm`` [hidden]. All but ``head``, in whose ``dtype`` logits
    are computed, are float32.
    """

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16):
        from loguru import logger
        from speculators.utils.loading import load_model_layers

        logger.disable("speculators")  # it warns of files that it merely looks for

        self.folder, self.config = folder, check_target(folder)
        names = ("embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        weights = {name: rows.to(device) for name, rows in load_model_layers(list(names), str(folder)).items()}
        self.embedding = weights[names[0]].float()
        self.head = weights.get(names[1], weights[names[0]]).to(dtype)
        self.norm = weights[names[2]].float()

    def logits(self, states: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, vocabulary or tokens] of the next token, from the last layer's output, [n, hidden]."""
        return self.normalised(states) @ (self.head if token_ids is None else self.head[token_ids]).T

    def normalised(self, states: torch.Tensor) -> torch.Tensor:
        """What the LM head reads of the last layer's output, [n, hidden]."""
        size, eps = self.norm.shape, self.config.get("rms_norm_eps", 1e-6)
        return torch.nn.functional.rms_norm(states.float(), size, self.norm, eps).to(self.head.dtype)

    def likeliest(self, states: torch.Tensor, token_ids: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the ``count`` likeliest of ``token_ids`` after each state, and their probabilities among these."""
        found, head = [], self.head[token_ids]
        for rows in states.split(AT_ONCE):
            logits = (self.normalised(rows) @ head.T).float()
            best, indices = logits.topk(count, 1)
            found.append((indices, (best - logits.logsumexp(1, keepdim=True)).exp()))
        indices, chances = zip(*found, strict=True)
        return torch.cat(indices), torch.cat(chances)

    def copy_tokenizer(self, out: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, out / name)

    def layer_shape(self) -> dict[str, Any]:
        """The sizes of the target's layers, as arguments of a configuration of transformers."""
        from transformers import AutoConfig

        # Not as they are in the file: older versions of transformers wrote other names, or left some of them out.
        config = AutoConfig.from_pretrained(self.folder)
        names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
        names += ["max_position_embeddings", "rms_norm_eps", "rope_parameters"]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {**{name: getattr(config, name) for name in names}, "head_dim": head_dim, "pad_token_id": None}
