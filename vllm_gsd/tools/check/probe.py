"""The probes, each run in its own process: ``python -m vllm_gsd.tools.check.probe TOPIC QUESTION``."""

import importlib
import json
import sys
from importlib.metadata import entry_points
from typing import Any

from vllm_gsd.config import GSDConfigError
from vllm_gsd.tools.check.probes import MARK, Finding

# Indexed by ``torch.ops.vllm_gsd.current_isa``.
INSTRUCTION_SETS = ("the processor's baseline", "AVX2", "AVX-512", "AVX-512 with BF16")


def kernels(question: dict[str, Any]) -> list[Finding]:
    """Which compiled kernels load. Without them the package works, but slowly."""
    found = []
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        return [Finding("kernels", "failed", f"torch cannot be imported ({_first_line(error)})")]
    for name, without in (("C", "PyTorch"), ("core", "plain Python")):
        module = f"vllm_gsd._{name}"
        try:
            importlib.import_module(f"vllm_gsd._{name}")  # spelled out for scripts/check_walls
        except ImportError as error:
            detail = f"{module} does not load ({_first_line(error)}); {without} is used instead, which is slower"
            found.append(Finding("kernels", "note", detail))
            continue
        detail = f"{module} is built"
        if name == "C":
            detail += f", and runs with {INSTRUCTION_SETS[torch.ops.vllm_gsd.current_isa()]}"
        found.append(Finding("kernels", "ok", detail))
    return found


def vllm(question: dict[str, Any]) -> list[Finding]:
    """Whether vLLM is installed in a supported version, has every symbol that gsd wraps, and finds the plugin."""
    from vllm_gsd.upstream.inventory import SUPPORTED_VLLM

    try:
        import vllm as upstream
    except Exception as error:  # a broken installation raises anything
        detail = f"it cannot be imported ({_first_line(error)}); install vLLM {SUPPORTED_VLLM}"
        return [Finding("vLLM", "failed", detail)]
    version = getattr(upstream, "__version__", "unknown")
    supported = ".".join(version.split(".")[:2]) in SUPPORTED_VLLM.split(" or ")
    found = [Finding("vLLM", "ok" if supported else "failed", f"{version}; {SUPPORTED_VLLM} is supported")]
    missing, number = _missing_symbols()
    found += [Finding("vLLM's symbols", "failed", f"this vLLM {problem}") for problem in missing]
    if not missing:
        found.append(Finding("vLLM's symbols", "ok", f"all {number} that gsd wraps are there"))
    names = {entry.name for entry in entry_points(group="vllm.general_plugins")}
    if "gsd" in names:
        found.append(Finding("plugin", "ok", "vLLM finds it"))
    else:
        found.append(Finding("plugin", "failed", "vLLM does not find it; install vllm-gsd with pip, beside vLLM"))
    return found


def _missing_symbols() -> tuple[list[str], int]:
    """Problems with the symbols wrapped on this platform, and the number of symbols checked."""
    from vllm_gsd.upstream.inventory import patches
    from vllm_gsd.upstream.patch import When
    from vllm_gsd.upstream.symbols import problem_with

    cases: list[When] = ["load", "engine", "v2"]
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        return [f"has no platforms ({_first_line(error)})"], 0
    if current_platform.is_cpu():
        cases += ["v1", "CPU", "v2 on a CPU"]
    looked_at = patches(*cases)
    # Like the plugin, import only what is patched at load time, and read the source of the rest.
    problems = [problem_with(patch, load=patch.when == "load") for patch in looked_at]
    return [problem for problem in problems if problem is not None], len(looked_at)


def engine(question: dict[str, Any]) -> list[Finding]:
    """Whether an engine would start: vLLM builds its configuration, and gsd rejects unsupported features.

    The question has "engine_args" for ``EngineArgs``, including model and speculative_config.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_gsd import register

    register()
    try:
        config = EngineArgs(**question["engine_args"]).create_engine_config()
    except GSDConfigError as error:
        return [Finding("engine", "failed", str(error))]
    except Exception as error:  # vLLM raises many types
        return [Finding("engine", "failed", f"vLLM rejects this configuration: {_first_line(error)}")]
    from vllm.platforms import current_platform

    dtype = str(config.model_config.dtype).removeprefix("torch.")
    runner = "V2" if config.use_v2_model_runner else "V1"
    platform = current_platform.device_name or current_platform.device_type
    length = config.model_config.max_model_len
    return [
        Finding("engine", "ok", f"nothing is refused; {dtype}, at most {length} tokens, platform {platform}"),
        Finding("model runner", "ok", runner),
        _attention(config),
    ]


def _attention(config: Any) -> Finding:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    from vllm_gsd.engine.attention.tree_rows import AttendsTrees
    from vllm_gsd.upstream.workers import attention_backends

    model = config.model_config
    try:
        if current_platform.is_cpu():
            from vllm_gsd.engine.attention.cpu import BACKENDS
        else:
            from vllm_gsd.engine.attention.cuda import BACKENDS
        with attention_backends(BACKENDS), set_current_vllm_config(config):
            backend = get_attn_backend(model.get_head_size(), model.dtype, config.cache_config.cache_dtype)
            follows = issubclass(backend.get_impl_cls(), AttendsTrees)
    except Exception as error:  # no backend fits, or a package is missing
        return Finding("attention", "failed", _first_line(error))
    if not follows:
        which = f"vLLM takes {backend.get_name()}, which does not attend along graphs"
        return Finding("attention", "failed", f"{which}; leave --attention-backend out, or set it to FLASH_ATTN")
    return Finding("attention", "ok", backend.__name__)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


PROBES = {"kernels": kernels, "vLLM": vllm, "engine": engine}


if __name__ == "__main__":
    print(MARK + json.dumps(PROBES[sys.argv[1]](json.loads(sys.argv[2]))))  # noqa: T201
