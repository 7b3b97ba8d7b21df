"""The plan of ``gpu_e2e`` and the evaluation of its results. Needs neither vLLM nor torch."""

import argparse
import statistics
from typing import Any


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int = 32000) -> dict[str, Any]:
    """A Llama configuration, of which only the shapes matter."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


# Targets in the shapes of Llama 2 and 3.1, with drafts in those of JackFram/llama-160m, TinyLlama 1.1B, Llama 3.2 1B.
SHAPES = {
    "7b": (llama(4096, 11008, 32, 32, 32), llama(768, 3072, 12, 12, 12)),
    "8b": (llama(4096, 14336, 32, 32, 8, 128256), llama(2048, 8192, 16, 32, 8, 128256)),
    "13b": (llama(5120, 13824, 40, 40, 40), llama(768, 3072, 12, 12, 12)),
    "70b": (llama(8192, 28672, 80, 64, 8), llama(2048, 5632, 22, 32, 4)),
}


def eagle_head(target: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE head for a target: one of its layers, its embeddings and its LM head."""
    return {**target, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}


def parameters(config: dict[str, Any], layers: int | None = None) -> int:
    """The number of weights of a model, with all of its layers or the given number."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = hidden * head * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return (layers or config["num_hidden_layers"]) * layer + 2 * config["vocab_size"] * hidden + hidden


def layers_that_fit(config: dict[str, Any], gib: float) -> int:
    """The number of layers with 16-bit weights that fit into ``gib`` GiB."""
    layers = config["num_hidden_layers"]
    while layers > 1 and 2 * parameters(config, layers) > gib * 2**30:
        layers -= 1
    return layers


def make_plan(options: argparse.Namespace) -> dict[str, Any]:
    """The models to generate and the engines to run, in order."""
    models, runs = {}, []
    for shape in options.shapes:
        target, draft = SHAPES[shape]
        layers = layers_that_fit(target, options.memory_gib - 2 * parameters(draft) / 2**30)
        models[f"target-{shape}"] = {**target, "num_hidden_layers": layers}
        models[f"draft-{shape}"] = eagle_head(models[f"target-{shape}"]) if options.eagle else draft
        base = {
            "kind": "time", "target": f"target-{shape}", "context": options.context, "max_tokens": options.max_tokens,
            "attention_backend": options.attention_backend, "dtype": "bfloat16",
        }  # fmt: skip
        for graphs in (True,) if options.no_eager else (True, False):
            mode = "CUDA graphs" if graphs else "eager"
            for method, config in _methods(
                f"draft-{shape}", options.nodes, "eagle" if options.eagle else "draft_model"
            ):
                task = {**base, "method": method, "cuda_graphs": graphs, "speculative": config}
                for batch in options.batches:
                    profile = options.profile and graphs and batch == 1
                    name = f"{shape}, batch {batch}, {mode}, {method}"
                    runs.append({**task, "name": name, "batch": batch, "profile": profile})
    if options.target:
        for method, config in (("plain", None), ("gsd", {"method": "gsd", "model": options.draft, "budget": 16})):
            runs += [
                {
                    "kind": "lossless", "name": f"lossless, batch {batch}, {method}", "method": method, "batch": batch,
                    "target": options.target, "context": 128, "max_tokens": 96, "cuda_graphs": True,
                    "attention_backend": options.attention_backend, "dtype": "float32", "speculative": config,
                }
                for batch in options.batches
            ]  # fmt: skip
    return {"models": models, "parameters": {name: parameters(model) for name, model in models.items()}, "runs": runs}


def by_engine(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group runs that one engine can do one after another, because they differ only in the number of requests."""
    engines: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        engine = {key: value for key, value in run.items() if key not in ("name", "batch", "profile")}
        engines.setdefault(repr(engine), []).append(run)
    return list(engines.values())


def _methods(draft: str, nodes: list[int], chain: str):
    """Plain decoding, vLLM's own chain, and graphs that always verify a fixed number of nodes."""
    yield "plain", None
    yield f"{chain} K=4", {"method": chain, "model": draft, "num_speculative_tokens": 4}
    for count in nodes:
        # Dummy weights give flat distributions, so keep every node to make the graph as large as allowed.
        yield f"gsd {count} nodes", {
            "method": "gsd", "model": draft, "sources": ["draft"], "num_speculative_tokens": count, "budget": count,
            "theta_prob": 0.0, "theta_sib": 0.0, "max_depth": 4,
        }  # fmt: skip


def compare(plan: dict[str, Any], results: dict[str, list[dict]]) -> dict[str, Any]:
    """Medians of every run, ratios to plain decoding in the same turn, failures, and differing tokens."""
    failed = [name for name, runs in results.items() if not runs or any("error" in run for run in runs)]
    medians: dict[str, dict[str, float]] = {}
    for entry in plan["runs"]:
        name, runs = entry["name"], results[entry["name"]]
        if name in failed or entry["kind"] == "lossless":
            continue
        keys = [key for key, value in runs[0].items() if isinstance(value, int | float)]
        medians[name] = {key: statistics.median(run[key] for run in runs) for key in keys}
        plain = results.get(name.removesuffix(entry["method"]) + "plain", [])
        pairs = list(zip(runs, plain, strict=False))
        if pairs and all("error" not in run for run in plain):
            medians[name]["of_plain"] = statistics.median(
                run["milliseconds_per_step"] / other["milliseconds_per_step"] for run, other in pairs
            )
    different = []
    for entry in plan["runs"]:
        plain_name = entry["name"].removesuffix("gsd") + "plain"
        if entry["kind"] == "lossless" and entry["method"] == "gsd" and not {entry["name"], plain_name} & set(failed):
            ours, theirs = (results[name][0]["tokens"] for name in (entry["name"], plain_name))
            unequal = sum(a != b for a, b in zip(ours, theirs, strict=True))
            if unequal:
                different.append(f"{entry['name']}: {unequal} of {len(ours)} texts differ from plain vLLM's")
    return {"medians": medians, "failed": failed, "different": different}


COLUMNS = {
    "milliseconds_per_step": "ms/step", "of_plain": "x plain", "verify_ms": "verify", "draft_ms": "draft",
    "draft_level_ms": "a level", "walk_ms": "walk", "compaction_ms": "move", "captured": "captured", "missed": "missed",
    "launches": "launches", "replays": "replays", "idle": "GPU idle",
}  # fmt: skip


def print_tables(report: dict[str, Any]) -> None:
    """Print a line for each engine. Times are milliseconds per step."""
    print("  ".join(f"{title:>9}" for title in COLUMNS.values()))
    for name, values in report["medians"].items():
        cells = [f"{values[key]:9.2f}" if key in values else f"{'-':>9}" for key in COLUMNS]
        print("  ".join(cells), f" {name}")
    for name in report["failed"]:
        error = next((run["error"] for run in report["results"][name] if "error" in run), "did not run")
        print(f"FAILED {name}: {error}")
    for line in report["different"]:
        print(f"DIFFERENT {line}")
