"""A made-up bench report with everything that the page can show."""

from vllm_gsd.tools.bench.parts import PARTS

RATIOS = {"plain": (1.0, 1.0, 1.0), "gsd-off": (1.6, 1.33, 1.2), "gsd": (2.73, 1.31, 1.21), "ngram": (1.1, 0.98, 0.9)}


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": 0.96 * value, "max": 1.05 * value}


def row(method: str, ratio: float, off: float, steps: float) -> dict:
    made = {
        "setting": f"{method} compiled",
        "tokens_per_second": spread(30 * ratio),
        "ttft_ms": spread(120),
        "tpot_ms": spread(30 / ratio),
        "tokens_per_step": spread(steps),
        "acceptance_by_depth": [] if steps == 1 else [0.6, 0.4, 0.2],
        "step_ms": 30.0,
        "step_parts_ms": {part: 30.0 / (place + 2) for place, part in enumerate(PARTS)},
        "peak_mb": 900.0,
        "ratio_to_plain": spread(ratio),
    }
    return made if method != "gsd" else {**made, "ratio_to_off": spread(ratio / off), "efficiency": 0.8}


def report(methods: tuple[str, ...] = tuple(RATIOS), whole: bool = True) -> dict:
    """A report on these methods with 1, 8 and 32 concurrent requests; ``whole`` adds all optional parts."""
    steps = {"gsd": 2.2, "ngram": 1.3}
    batches = {
        batch: {name: row(name, RATIOS[name][place], RATIOS["gsd-off"][place], steps.get(name, 1)) for name in methods}
        for place, batch in enumerate(("1", "8", "32"))
    }
    made = {
        "settings": {"target": "<b>target</b>", "draft": "draft", "repeats": 3},
        "batches": batches,
        "categories": {"code": {name: RATIOS[name][0] for name in methods}, "": dict.fromkeys(methods, 1.0)},
        "forms": {"code": {"gsd": {"without": 0.2, "chains": 0.3, "branched": 0.5}}},
        "skipped": {"suffix": "needs the package arctic-inference"},
    }
    bounds, few = {"mean": 1.1, "low": 1.02, "high": 1.2}, {"mean": 1.1, "low": None, "high": None}
    more = {
        "forms_in_turns": {
            "": {"prompts": 4, "gsd-tree": bounds, "gsd-chain": bounds},
            "code": {"prompts": 2, "gsd-tree": few, "gsd-chain": few},
        },
        "contexts": {
            "gsd": {"step_ms": {"20": 20.0, "60": 22.0}, "tokens_per_step": {"20": 2.0, "60": 2.1}, "growth": few}
        },
        "analyses": {
            "ablations": {
                "top_k": [
                    {"value": k, "tokens_per_step": 1.5 + k / 10, "drafted_per_accepted": float(k)} for k in (1, 4, 8)
                ]
            },
            "recurring_ngrams": {"2": 0.3, "3": 0.1},
            "forms": {
                form: [{"nodes": n, "tokens_per_step": most * n, "draft_rows_per_step": 7.0 + n} for n in (8, 16)]
                for form, most in (("gsd", 0.2), ("gsd-tree", 0.1))
            },
        },
    }
    return {**made, **more} if whole else made
