"""The server of a soak: ``vllm serve`` with gsd, and a KV cache too small for all concurrent requests."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parents[2] / "tests"
FOLDERS = [str(path) for path in (TESTS, TESTS / "e2e", TESTS / "e2e" / "v2")]
sys.path[:0] = [path for path in FOLDERS if path not in sys.path]

from adapters import RANK, build_adapter  # noqa: E402
from serve_process import FORKING, VLLM, Server, serving  # noqa: E402
from text_pair import build_text_pair  # noqa: E402

NAME = "target"
BLOCK_SIZE = 32  # the minimum on CPUs
# Settings that make leaks visible in the memory. By default, oneDNN caches 1,024 compiled matrix products of about
# 0.3 MiB each. glibc dynamically raises the size from which it returns freed memory at once, and then keeps more and
# more freed memory.
SETTLED = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
# Model lengths. Model Runner V2 is interpreted on CPUs, where a longer one costs time.
LENGTHS = {"v1": 512, "v2": 256}


@dataclass(frozen=True)
class Setting:
    """A server to start.

    Args:
        runner: "v1" or "v2".
        concurrency: maximum concurrent requests.
        target, draft: folders; None for the tiny pair, which has LoRA adapters on V1.
        gsd: more keys of gsd.json.
    """

    runner: str
    concurrency: int
    target: Path | None = None
    draft: Path | None = None
    gsd: dict = field(default_factory=dict)

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache: enough for one request of full length, but not for the whole load."""
        return LENGTHS[self.runner] // BLOCK_SIZE + 2 * self.concurrency + 1


@contextlib.contextmanager
def soaked_server(setting: Setting, folder: Path) -> Iterator[tuple[Server, list[str], set[int]]]:
    """Yields a ready server, the names of its LoRA adapters, and the target's end-of-text tokens."""
    target, draft, adapters = setting.target, setting.draft, {}
    if target is None:
        pair = build_text_pair(folder)
        target, draft = pair.target, draft or pair.draft
        if setting.runner == "v1":
            adapters = {f"adapter{seed}": build_adapter(folder / f"adapter{seed}", target, seed) for seed in (1, 2)}
    config = folder / "gsd.json"
    config.write_text(json.dumps({"method": "gsd", "model": draft and str(draft), **setting.gsd}))
    flags = ["--enable-prefix-caching"]
    if adapters:
        flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules"]
        flags += [f"{name}={path}" for name, path in adapters.items()]
    options = {
        "served_model_name": NAME,
        "max_model_len": LENGTHS[setting.runner],
        "max_num_seqs": setting.concurrency,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": setting.kv_blocks,
        "structured_outputs_config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "speculative_config": config,
    }
    command = [sys.executable, str(FORKING), str(VLLM)]
    if setting.runner == "v2":
        options["max_num_batched_tokens"] = 256
        command = [sys.executable, str(TESTS / "e2e/v2/forking_v2.py"), str(VLLM)]
    with _environment(setting.runner), serving(target, folder, *flags, command=command, **options) as server:
        server.wait()
        yield server, list(adapters), _ends(target)


def _environment(runner: str) -> Any:
    """A context in which a process of this runner can be started."""
    variables = dict(SETTLED)
    if runner == "v2":
        from v2_engine import variables_of_programs

        variables |= variables_of_programs()
    return mock.patch.dict(os.environ, variables)


def _ends(target: Path) -> set[int]:
    ends: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (target / file).is_file():
            eos = json.loads((target / file).read_text("utf-8")).get("eos_token_id")
            ends |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return ends
