"""Serve the built-in pair for the other examples. Arguments such as ``--port 8001`` are passed to ``vllm serve``.

With ``--adapters``, clients may load LoRA adapters into the server, as ``examples/client/lora.py`` does. They name
files that the server then reads from its machine, so use this flag only if you trust every client.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

from vllm_gsd.tools.models import built_in_pair

ADAPTERS = "--adapters"


def arguments(given: list[str]) -> list[str]:
    """The model and the options of ``vllm serve``, for the arguments given to this program."""
    pair = built_in_pair()
    sources = ["draft", "ngram"]
    if importlib.util.find_spec("arctic_inference"):  # docs/drafts.md says how to install it
        sources.append("shared")
    gsd = {"method": "gsd", "model": str(pair.draft), "sources": sources}
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    adapters = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"] if ADAPTERS in given else []
    others = [argument for argument in given if argument != ADAPTERS]
    return [str(pair.target), "--speculative-config", json.dumps(gsd), *tools, *adapters, *others]


def environment(given: list[str]) -> dict[str, str]:
    """The environment variables of the server, for the arguments given to this program."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if ADAPTERS in given else {}


if __name__ == "__main__":
    os.environ.update(environment(sys.argv[1:]))
    vllm = Path(sys.executable).with_name("vllm")
    os.execv(vllm, [str(vllm), "serve", *arguments(sys.argv[1:])])  # noqa: S606
