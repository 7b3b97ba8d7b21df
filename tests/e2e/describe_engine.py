"""Describes an engine without speculative config as JSON on stdout: its classes, output and metrics.

Reads JSON ``{"model": folder, "prompts": lists of token ids, "params": dicts}`` from stdin; the log goes to stderr.
"""

import contextlib
import json
import sys


def main() -> None:
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        description = _describe(**request)
    json.dump(description, sys.stdout)


def _describe(model: str, prompts: list[list[int]], params: list[dict]) -> dict:
    from engine_process import DEFAULTS, model_runner, scheduler
    from vllm import LLM, SamplingParams

    llm = LLM(model, **DEFAULTS, skip_tokenizer_init=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, [SamplingParams(**keys) for keys in params], use_tqdm=False)
    runner = model_runner(llm)
    config = llm.llm_engine.vllm_config
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    backends = {group.backend for groups in runner.attn_groups for group in groups}
    layers = config.compilation_config.static_forward_context.values()
    used = [
        type(llm.llm_engine.engine_core.engine_core),
        type(scheduler(llm)),
        type(worker),
        type(runner),
        type(runner.sampler),
        type(runner.input_batch),
        *backends,
        *{type(layer.impl) for layer in layers},
    ]
    description = {
        "classes": sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in used),
        "lookahead": config.num_lookahead_tokens,
        "additional_config": config.additional_config,
        "num_blocks": runner.kv_cache_config.num_blocks,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "metrics": sorted({metric.name for metric in llm.get_metrics()}),
        "plugin_loaded": "vllm_gsd.upstream.hooks" in sys.modules,
        "gsd_modules": sorted(name for name in sys.modules if name.startswith("vllm_gsd.")),
    }
    llm.llm_engine.engine_core.shutdown()
    return description


if __name__ == "__main__":
    main()
