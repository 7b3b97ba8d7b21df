"""The pipeline from a target to its draft. Every stage stores its result in a work folder and runs only once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shlex
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gsd.config.draft_kind import is_eagle
from vllm_gsd.tools.distill import generate, prompts, student
from vllm_gsd.tools.distill.card import write_card
from vllm_gsd.tools.distill.options import DistillError, Options

if TYPE_CHECKING:
    from datasets import Dataset

    from vllm_gsd.tools.distill.hidden_states import Features

logger = logging.getLogger("vllm_gsd.tools.distill")

# Shares of the time limit for answers and training. The rest is for validation in three engines.
ANSWERS_SHARE, TRAINING_SHARE = 0.4, 0.3
# The average time of a shard relative to the first one: its requests are made up, or quote long passages.
LATER_SHARD = 1.5
# Shares of the answers to requests about earlier answers, and to requests that the target made up.
SECOND_ROUND, OWN = 0.3, 0.5
# One answer in this many is held out, and this many held-out prompts are decoded in the real engine.
HELD_OUT, ENGINE_PROMPTS = 40, 12
# The default share of the target that a student reads per level.
DEFAULT_COST = 0.04
# The size of the target's KV cache while it answers.
KV_CACHE_GIB = 3.0


def distill(options: Options, out: Path, work: Path) -> dict[str, float]:
    """Make the draft in ``out``, resuming an earlier run with the same options in ``work``.

    Returns:
        the measurements ``top_1``, ``top_4`` and, with ``engine``, ``tokens_per_step`` and ``speed_up``.

    Raises:
        BenchError, DistillError, PromptsError, StudentError: the message is one sentence.
    """
    if options.eagle is None:
        options = replace(options, eagle=_eagle_by_default(options))
    _check(options, out, work)
    config = student.target_config(Path(options.target))
    # This rejects an impossible size before anything is generated.
    shape = None if options.init is not None or options.eagle else _shape(options, config)
    files = _in_own_process(make_answers, options, work)
    logger.info("the answers are in %d files; making the student", len(files))
    from vllm_gsd.tools.distill.train import load_answers

    data = load_answers(files, options.longest)
    held_out = data.select(range(0, len(data), HELD_OUT))
    training = data.select([i for i in range(len(data)) if i % HELD_OUT]) if len(data) > 1 else data
    features = None
    if options.eagle:
        from vllm_gsd.tools.distill.hidden_states import write_features

        features = _in_own_process(write_features, Path(options.target), files, work / "features")
    start = work / "start"
    if not (start / "config.json").is_file():
        _make_start(options, config, shape, training, features, start)
    results = _train(options, work, start, training, held_out, features)
    if options.engine:
        from vllm_gsd.tools.distill.engine import compare

        logger.info("decoding %d prompts with and without the draft", min(ENGINE_PROMPTS, len(held_out)))
        texts = [row["input_ids"][: int(row["prompt_len"])].tolist() for row in held_out]
        chosen = texts[:: max(1, len(texts) // ENGINE_PROMPTS)][:ENGINE_PROMPTS]
        results |= compare(Path(options.target), work / "trained", chosen, 96, options.eager, work / "engines")
    _finish(options, work, out, training, results)
    return results


def _eagle_by_default(options: Options) -> bool:
    if options.init is not None:
        return is_eagle(Path(options.init))
    return not (options.params or options.cost or options.layers)


def _check(options: Options, out: Path, work: Path) -> None:
    _ = options.own_layers
    if out.exists() and any(out.iterdir()):
        raise DistillError(f"--out {str(out)!r} is not empty; give a new folder.")
    if (options.params is None) + (options.cost is None) + (not options.layers) + (options.init is None) < 3:
        raise DistillError("--params, --cost, --layers and --init exclude each other; give only one of them.")
    if options.eagle and (options.params or options.cost or options.layers):
        raise DistillError("--eagle makes one layer of the target's shape and excludes --params, --cost and --layers.")
    if options.init is not None and is_eagle(Path(options.init)) != options.eagle:
        raise DistillError(f"--init {options.init!r} needs --eagle if it is an EAGLE-style draft, else excludes it.")
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "options.json"
    given = json.loads(json.dumps(asdict(options)))
    if kept.is_file() and json.loads(kept.read_text()) != given:
        raise DistillError(f"{str(work)!r} holds a run with other options; give another --work or delete it.")
    kept.write_text(json.dumps(given, indent=1))


def _shape(options: Options, config: dict[str, Any]) -> student.Shape:
    if options.layers:
        return student.layers_shape(config, options.own_layers, options.vocab_size)
    cost = DEFAULT_COST if options.params is None and options.cost is None else options.cost
    return student.choose_shape(config, options.params, cost, options.vocab_size)


# --- stages -----------------------------------------------------------------------------------------


def _in_own_process(function, *arguments):
    """Call the function in its own process, whose end frees the GPU memory that vLLM takes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def make_answers(options: Options, work: Path) -> list[Path]:
    """Generate the target's answers and return their files."""
    answers = work / "answers"
    answers.mkdir(exist_ok=True)
    features = work / "features" if options.eagle else None
    if features is not None:
        features.mkdir(exist_ok=True)
    started: list[Any] = []

    def llm() -> Any:
        if not started:
            longest = options.longest + options.max_tokens
            started.append(
                generate.start_target(
                    options.target,
                    max_model_len=longest,
                    batch=options.batch,
                    kv_cache_gib=KV_CACHE_GIB,
                    eager=options.eager,
                )
            )
        return started[0]

    def answer(chats: list[prompts.Chat], name: str, seed: int) -> list[str]:
        return generate.answer(llm, chats, answers, name, max_tokens=options.max_tokens, seed=seed, features=features)

    if options.prompts is not None:
        answer(prompts.from_file(Path(options.prompts))[: options.answers], "file", options.seed)
        return sorted(answers.glob("*.parquet"))
    count = _planned_answers(options, work, llm, lambda chats: answer(chats, "first", options.seed))
    own, second = later_rounds(count)
    asked = prompts.first_round(count - own - second, options.seed)
    about = list(zip(asked, answer(asked, "first", options.seed), strict=True))
    if own:
        asked = generate.own_requests(llm, own, answers / "own.json", options.seed)
        # Templates fill up what the target does not make up.
        asked += prompts.first_round(own - len(asked), options.seed + 2)
        about += zip(asked, answer(asked, "own", options.seed + 2_000_000), strict=True)
    if second:
        answer(prompts.second_round(second, options.seed + 1, about), "second", options.seed + 1_000_000)
    return sorted(answers.glob("*.parquet"))


def later_rounds(count: int) -> tuple[int, int]:
    """The numbers of answers, of ``count``, to the target's own requests and in the second round, in whole shards.

    At least one shard belongs to the first round. It is timed to plan the others.
    """
    shards = count // generate.SHARD
    own = max(0, min(round(OWN * shards), shards - 1))
    second = max(0, min(round(SECOND_ROUND * shards), shards - 1 - own))
    return own * generate.SHARD, second * generate.SHARD


def _planned_answers(options: Options, work: Path, llm, answer) -> int:
    """The number of answers that the time allows, decided once. ``llm`` and ``answer``: see ``make_answers``."""
    plan = work / "answers.json"
    if options.minutes is None:
        return options.answers
    if not plan.is_file():
        first = prompts.first_round(min(options.answers, generate.SHARD), options.seed)
        # A shard that a killed run left would take no time.
        generate.shard_path(work / "answers", "first", 0).unlink(missing_ok=True)
        begun = time.perf_counter()
        llm()
        ready = time.perf_counter()
        answer(first)
        now = time.perf_counter()
        left = 60 * options.minutes * ANSWERS_SHARE - (now - begun)
        shards = 1 + max(0, int(left / (LATER_SHARD * (now - ready))))
        plan.write_text(json.dumps({"answers": min(options.answers, shards * generate.SHARD)}))
    return int(json.loads(plan.read_text())["answers"])


def _make_start(
    options: Options,
    config: dict[str, Any],
    shape: student.Shape | None,
    data: Dataset,
    features: Features | None,
    start: Path,
) -> None:
    counts = np.zeros(config["vocab_size"])
    for row in data:
        np.add.at(counts, row["input_ids"][int(row["prompt_len"]) :], 1)
    ends = config.get("eos_token_id")
    ranking = student.rank_tokens(counts, ends if isinstance(ends, list) else [ends] if ends is not None else [])
    making = start.with_suffix(".partial")
    shutil.rmtree(making, ignore_errors=True)
    if options.init is not None:
        shutil.copytree(options.init, making)
        student.write_draft_vocab(making, ranking[: options.vocab_size])
    elif features is not None:
        from vllm_gsd.tools.distill.eagle import make_start

        make_start(Path(options.target), making, ranking[: options.vocab_size], data, features)
    elif shape is not None:
        student.make_student(Path(options.target), making, shape, ranking, options.seed)
    making.rename(start)


def _train(
    options: Options, work: Path, start: Path, training: Dataset, held_out: Dataset, features: Features | None
) -> dict[str, float]:
    from vllm_gsd.tools.distill import eagle
    from vllm_gsd.tools.distill.train import TrimmedStudent, collate, load_distillation, save_trained, train
    from vllm_gsd.tools.distill.validate import agreement

    kept = work / "results.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    begun = time.perf_counter()
    model: TrimmedStudent
    if features is None:
        model, collator, save = load_distillation(start, bool(options.layers)), collate, save_trained
    else:
        model, collator, save = eagle.load(start, Path(options.target)), features.collate, eagle.save_trained
    train(
        model,
        work,
        training,
        collator,
        epochs=options.epochs,
        minutes=None if options.minutes is None else options.minutes * TRAINING_SHARE,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    minutes = (time.perf_counter() - begun) / 60
    save(model, start, work / "trained")
    results = {**agreement(model, held_out, collator), "minutes": minutes}
    kept.write_text(json.dumps(results))
    return results


def _finish(options: Options, work: Path, out: Path, training: Dataset, results: dict[str, float]) -> None:
    from vllm_gsd.config.draft_vocab import choose_draft_vocab, read_draft_vocab
    from vllm_gsd.tools.distill.train import BATCH, count_parameters

    trained = work / "trained"
    config = json.loads((trained / "config.json").read_text())
    chosen = choose_draft_vocab(read_draft_vocab(trained), config["vocab_size"], None)
    vocab_size = config["vocab_size"] if chosen is None else len(chosen)
    total, read = count_parameters(trained, vocab_size)
    made_of = f"{config['num_hidden_layers']} layers of width {config['hidden_size']}"
    if options.eagle:
        made_of = "one layer on the target's hidden states, in EAGLE's format; embedding and LM head are the target's"
    elif options.init is None and not options.layers:
        made_of += ", on the target's projected embedding"
    if options.layers:
        made_of = f"the target's layers {', '.join(map(str, options.own_layers))}"
    elif options.init is not None:
        made_of = f"the draft {Path(options.init).name}, trained on"
    facts = {
        "target": Path(options.target).name,
        "name": out.name,
        "vocab_size": vocab_size,
        "full_vocab": config["vocab_size"],
        "made_of": made_of,
        "parameters": total,
        "read": read,
        "answers": len(training),
        "tokens": int(sum(len(row["input_ids"]) - int(row["prompt_len"]) for row in training)),
        "prompts": "to built-in templates" if options.prompts is None else f"to {Path(options.prompts).name}",
        "steps": int(json.loads((work / "steps.json").read_text())["steps"]),
        "batch": BATCH,
        "minutes": results.pop("minutes", 0.0),
        "command": shlex.join(["vllm-gsd", *sys.argv[1:]]),
    }
    making = out.with_name(out.name + ".partial")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(trained, making)
    write_card(making, facts, results)
    if out.exists():
        out.rmdir()
    making.rename(out)
