"""Serve the built-in pair for the other examples. Arguments go to ``vllm serve``, such as ``--port 8001``."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from vllm_gsd.tools.models import built_in_pair


def arguments() -> list[str]:
    """The model and the options of ``vllm serve``."""
    pair = built_in_pair()
    sources = ["draft", "ngram"]
    if importlib.util.find_spec("arctic_inference"):  # pip install 'vllm-gsd[shared]'
        sources.append("shared")
    gsd = {"method": "gsd", "model": str(pair.draft), "sources": sources}
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    adapters = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    return [str(pair.target), "--speculative-config", json.dumps(gsd), *tools, *adapters]


if __name__ == "__main__":
    # For examples/client/lora.py. Only for clients that you trust, because they name files on this machine.
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    vllm = Path(sys.executable).with_name("vllm")
    os.execv(vllm, [str(vllm), "serve", *arguments(), *sys.argv[1:]])  # noqa: S606
