"""Load a LoRA adapter into the running server and ask the model with it and without it.

The draft has no adapter: it drafts as before, and the target with the adapter decides. Without an argument, the program
writes a small random adapter for the built-in target, in place of one that you have trained. The server must run on
this machine with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and ``--enable-lora``, as started by ``examples/serve.py
--adapters``.
"""

import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

from openai import OpenAI

NAME, RANK = "mine", 8

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")


def random_adapter(folder: Path) -> Path:
    """Write an adapter for the attention's output projections of the built-in target, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    from vllm_gsd.tools.models import built_in_pair

    shape = json.loads((built_in_pair().target / "config.json").read_text())
    size, random = shape["hidden_size"], torch.Generator().manual_seed(0)
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{half}.weight": scale
            * torch.randn(rows, columns, generator=random)
            for layer in range(shape["num_hidden_layers"])
            for half, rows, columns, scale in (("A", RANK, size, 1.0), ("B", size, RANK, 0.01))
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def post(path: str, keys: dict) -> None:
    url = f"{client.base_url}{path}"
    request = urllib.request.Request(url, json.dumps(keys).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request).close()


with tempfile.TemporaryDirectory() as folder:
    adapter = Path(sys.argv[1]) if len(sys.argv) > 1 else random_adapter(Path(folder))
    model = client.models.list().data[0].id
    post("load_lora_adapter", {"lora_name": NAME, "lora_path": str(adapter.resolve())})
    for name in (model, NAME):
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Why is the sky blue?"}], temperature=0, max_tokens=40
        )
        print(f"{name}: {answer.choices[0].message.content}")
    post("unload_lora_adapter", {"lora_name": NAME})
