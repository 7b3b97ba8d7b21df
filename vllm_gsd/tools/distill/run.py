"""The pipeline from a target to its draft. Every stage stores its result in a work folder and runs only once."""

import fcntl
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vllm_gsd.tools.distill.answers import make_answers
from vllm_gsd.tools.distill.card import write_card
from vllm_gsd.tools.distill.checks import check_run
from vllm_gsd.tools.distill.data import Answer, divided, load_answers
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.stages import files_of_answers, kept, logger, read_json, stage
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.process import end_with_parent
from vllm_gsd.tools.prompt_file import thinned

# Shares of the time limit for answers and training. The rest is for a CPU's states and for three engines at the end.
ANSWERS_SHARE, TRAINING_SHARE = 0.3, 0.3
# So many held-out prompts are decoded in the real engine.
ENGINE_PROMPTS = 12


def distill(options: Options, out: Path, work: Path) -> dict[str, Any]:
    """Make the draft in ``out``, resuming an earlier run with the same options in ``work``.

    Returns:
        the measurements of ``agreement`` and, with ``engine``, what ``engine.compare`` returns.

    Raises:
        ToolError: the message is one sentence.
    """
    out = out.resolve()  # a link to an empty folder cannot be replaced by one
    check_run(options, out, work)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError(f'Another run is working in "{work}"; wait for its end, or give another --work.') from None
        try:
            return _run(options, out, work)
        except ToolError:
            if not files_of_answers(work) and not (work / "steps.json").exists():  # so that a mistake can be corrected
                for name in ("options.json", "files.json"):
                    (work / name).unlink(missing_ok=True)
            raise


def _run(options: Options, out: Path, work: Path) -> dict[str, Any]:
    # Before the target answers for hours: the packages that training needs.
    import vllm_gsd.tools.distill.speculators_students  # noqa: F401

    answers = Path(options.data or work)
    if options.data is None:
        _in_own_process(make_answers, options, work, options.minutes and options.minutes * ANSWERS_SHARE)
    names = kept(work / "files.json", lambda: [file.name for file in files_of_answers(answers)])
    files = [answers / "answers" / name for name in names]
    training, held_out = divided(load_answers(files, options.longest))
    results = kept(work / "results.json", lambda: _in_own_process(_train, options, work, files, training, held_out))
    if options.engine:
        from vllm_gsd.tools.distill.engine import compare

        logger.info("decoding %d prompts with and without the draft", min(ENGINE_PROMPTS, len(held_out)))
        chosen = [answer.input_ids[: answer.prompt_len].tolist() for answer in thinned(held_out, ENGINE_PROMPTS)]
        results |= kept(
            work / ("gain-eager.json" if options.eager else "gain.json"),
            lambda: compare(Path(options.target), work / "trained", chosen, 96, options.eager, work / "engines"),
        )
    _finish(options, answers, work, out, training, results)
    return results


def _begin_process(level: int, parent: int) -> None:
    """Log as the command does, and end when its process ``parent`` does, even if that is killed."""
    logging.basicConfig(level=level, format="%(message)s")
    end_with_parent()
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _in_own_process(function, *arguments):
    """Call the function in its own process, whose end frees the GPU memory that it takes. Engines need nearly all."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _begin_process, (logger.getEffectiveLevel(), os.getpid())) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ToolError(
                "A process of the run was killed, perhaps because memory ran out; start the command again to resume."
            ) from None
        except (SafetensorError, RuntimeError) as error:  # a full disk, where torch.save names its source, or memory
            out_of_memory = type(error).__name__ == "OutOfMemoryError"  # PyTorch's
            if type(error) is not SafetensorError and not out_of_memory and "inline_container" not in str(error):
                raise
            reason = str(error).split("\n")[0][:200].rstrip(". ")
            raise ToolError(f"{reason}; free the disk or the GPU's memory and start the command again.") from None


def _train(
    options: Options, work: Path, files: list[Path], training: list[Answer], held_out: list[Answer]
) -> dict[str, Any]:
    """Train the student on answers of the files, write it to ``work/trained`` and measure its agreement."""
    import numpy as np
    import torch

    from vllm_gsd.tools.distill.data import count_tokens
    from vllm_gsd.tools.distill.hardware import found_hardware
    from vllm_gsd.tools.distill.lm import LanguageModel
    from vllm_gsd.tools.distill.speculators_students import BlockStudent, Eagle3Student
    from vllm_gsd.tools.distill.states import ComputedStates, StoredStates, write_missing
    from vllm_gsd.tools.distill.target import Target
    from vllm_gsd.tools.distill.train import train
    from vllm_gsd.tools.distill.validate import agreement

    torch.compiler.set_stance("force_eager")  # speculators compiles on GPUs, for each size of a batch again
    folder, (device, dtype, *_) = Path(options.target), found_hardware()
    states = files[0].parents[1] / "states"
    if device == "cpu":
        with stage("the target's states over the answers"):
            write_missing(folder, files, states, dtype)
    with stage("loading the target and making the student"):
        target = Target(folder, device, dtype)
        counts = count_tokens(training, target.config["vocab_size"])
        if (ends := target.config.get("eos_token_id")) is not None:
            counts[ends] = counts.max() + 1
        kinds: dict[str, Any] = {"dspark": BlockStudent, "eagle3": Eagle3Student, "lm": LanguageModel}
        model = kinds[options.kind].make(options, target, np.argsort(-counts, kind="stable"))
        packs = model.packs(StoredStates(states) if device == "cpu" else ComputedStates(folder, device, dtype=dtype))
    limit = options.minutes and options.minutes * (TRAINING_SHARE + ANSWERS_SHARE * (options.data is not None))
    with stage("the student's first weights"):
        model.start(training, packs, options.init is None)
    steps = train(model, work, training, packs, options, limit)
    with stage("measuring agreement"):
        found = agreement(model, held_out, packs)
    model.save(work / "trained")
    own = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {**found, "steps": steps, "batch": model.batch, "trained": own, "vocab_size": len(model.token_ids)}


def _finish(
    options: Options, answers: Path, work: Path, out: Path, training: list[Answer], results: dict[str, Any]
) -> None:
    asked = read_json(answers / "options.json")["prompts"]
    learned_from = "to templates and its own requests" if asked is None else f"to {Path(asked).name}"
    if options.init is not None:
        learned_from += f"; begun from the draft {Path(options.init).name!r}, whose own training is not counted"
    facts = {
        "target": Path(options.target).absolute().name,
        "name": out.name,
        "kind": options.kind,
        "answers": len(training),
        "tokens": sum(len(answer.input_ids) - answer.prompt_len for answer in training),
        "prompts": learned_from,
        "command": shlex.join(["vllm-gsd", *sys.argv[1:]]),
    }
    # Beside the result, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        making = Path(folder, out.name)
        # Files with usual modes: safetensors' own could be read by this user only.
        shutil.copytree(work / "trained", making, copy_function=shutil.copyfile)
        write_card(making, facts, results)
        if out.exists():
            out.rmdir()
        making.rename(out)
