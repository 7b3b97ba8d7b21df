"""The pipeline from a target to its draft. Every stage stores its result in a work folder and runs only once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from vllm_gsd.config import GSDConfigError
from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.config.draft_kind import EAGLE3, LANGUAGE_MODEL, kind_of, read_config
from vllm_gsd.config.speculators_folder import is_speculators
from vllm_gsd.tools.cli.options import flag
from vllm_gsd.tools.distill.answers import make_answers
from vllm_gsd.tools.distill.card import write_card
from vllm_gsd.tools.distill.options import EAGLE3_LAYERS, NARROWEST, Options
from vllm_gsd.tools.distill.stages import kept, logger, stage
from vllm_gsd.tools.distill.states import state_layers, stored_shape, write_missing
from vllm_gsd.tools.distill.target import check_target
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import make_folder
from vllm_gsd.tools.process import end_with_parent
from vllm_gsd.tools.prompt_file import read_requests, thinned

if TYPE_CHECKING:
    from vllm_gsd.tools.distill.data import Answer

# Shares of the time limit for answers and training. The rest is for validation in three engines.
ANSWERS_SHARE, TRAINING_SHARE = 0.4, 0.3
# One answer in this many is held out, and this many held-out prompts are decoded in the real engine.
HELD_OUT, ENGINE_PROMPTS = 40, 12
# Options of engines, on which no stored result depends. A run resumes with others.
OF_ENGINES = ("engine", "eager")
# Options that are paths, and the name of what is compared beside the options.
PATHS = ("target", "prompts", "data", "init")
NAMES = {"prompts_sha256": "the content of --prompts"}


def distill(options: Options, out: Path, work: Path) -> dict[str, Any]:
    """Make the draft in ``out``, resuming an earlier run with the same options in ``work``.

    Returns:
        the measurements of ``agreement`` and, with ``engine``, what ``engine.compare`` returns.

    Raises:
        ToolError: the message is one sentence.
    """
    out = out.resolve()  # a link to an empty folder cannot be replaced by one
    _check(options, out, work)
    with _only_run(work):
        return _run(options, out, work)


def _run(options: Options, out: Path, work: Path) -> dict[str, Any]:
    # Before the target answers for hours: the packages that training needs.
    import vllm_gsd.tools.distill.speculators_students  # noqa: F401

    answers = work if options.data is None else Path(options.data)
    if options.data is None:
        minutes = None if options.minutes is None else options.minutes * ANSWERS_SHARE
        try:
            _in_own_process(make_answers, options, work, minutes)
        except ToolError:
            if not _files_of_answers(work):  # so that a mistake in the options can be corrected
                (work / "options.json").unlink()
            raise
    from vllm_gsd.tools.distill.data import load_answers
    from vllm_gsd.tools.distill.hardware import found_hardware

    files = kept(work / "files.json", lambda: [file.name for file in _files_of_answers(answers)])
    paths = [answers / "answers" / name for name in files]
    if (hardware := found_hardware()).device == "cpu":
        with stage("completing the states"):
            _in_own_process(write_missing, Path(options.target), paths, answers / "states", hardware.dtype)
    with stage(f"reading the answers in {len(files)} files"):
        data = load_answers(paths, options.longest)
    if not data:
        (work / "files.json").unlink()  # so that answers can be added
        if options.data is not None:  # so that the option can be corrected
            (work / "options.json").unlink()
        raise ToolError(
            f"--longest is {options.longest}, but no request with an answer of two tokens fits into it; raise it."
        )
    held_out = data[::HELD_OUT]
    training = [answer for i, answer in enumerate(data) if i % HELD_OUT] if len(data) > 1 else data
    results = kept(
        work / "results.json", lambda: _in_own_process(_train, options, work, answers / "states", training, held_out)
    )
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


def _check(options: Options, out: Path, work: Path) -> None:
    """Refuse what cannot work. The options are stored last, so that a mistake in them can be corrected."""
    config = check_target(Path(options.target))
    most, heads = config["hidden_size"], config["num_attention_heads"]
    if options.kind == "eagle3" and config["num_hidden_layers"] < EAGLE3_LAYERS:
        raise ToolError(
            f"--kind eagle3 reads {EAGLE3_LAYERS} layers, but the target has only {config['num_hidden_layers']}."
        )
    if options.kind == "eagle3" and most % heads:
        raise ToolError(
            "--kind eagle3 makes a layer of Llama's, where the hidden size must be a multiple of its attention heads, "
            f"but the target has {most} and {heads}."
        )
    if options.kind == "lm" and most < NARROWEST:
        raise ToolError(f"--kind lm needs a target of hidden size {NARROWEST} or more, but the target's is {most}.")
    for name in ("width", "rank"):
        given = getattr(options, name)
        if given is not None and given > most:
            raise ToolError(f"{flag(name)} is {given}, but must be at most the target's hidden size, {most}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "not empty" if out.is_dir() else "no folder"
        raise ToolError(f"--out {str(out)!r} is {what}; give a new folder.")
    if options.init is not None:
        _check_init(options.init, options, config)
    if options.prompts is not None:
        read_requests(Path(options.prompts))
    if options.data is not None:
        _check_data(Path(options.data), Path(options.target), config)
    folders = out.resolve(), work.resolve()
    if any(one in (other, *other.parents) for one, other in (folders, folders[::-1])):
        raise ToolError(
            f"--work {str(work)!r} and --out {str(out)!r} must not contain each other; give another folder."
        )
    make_folder(out.absolute().parent, "--out")  # the draft is made beside it and then moved
    make_folder(work, "--work")
    given = _comparable(options)
    first = kept(work / "options.json", lambda: given)
    others = [name for name in {**first, **given} if first.get(name, ...) != given.get(name, ...)]
    if differing := [NAMES.get(name, flag(name)) for name in others if name not in OF_ENGINES]:
        raise ToolError(
            f"{str(work)!r} holds a run with other options ({', '.join(differing)}); give another --work, with --data "
            f"{str(work)!r} for the same answers, or delete it."
        )


def _comparable(options: Options) -> dict[str, Any]:
    """The options as a resumed run compares them: paths wherever it is started, and requests by their content."""
    given: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    for name in PATHS:
        given[name] = given[name] and str(Path(given[name]).resolve())
    if options.prompts is not None:
        given["prompts_sha256"] = hashlib.sha256(Path(options.prompts).read_bytes()).hexdigest()
    return given


def _check_init(init: str, options: Options, config: dict[str, Any]) -> None:
    """Refuse a draft of another kind or for another target."""
    if not (Path(init) / "config.json").is_file():
        raise ToolError(f"--init {init!r} is not a folder with a config.json; give the folder of a draft.")
    kind = kind_of(Path(init))
    if kind != {"lm": LANGUAGE_MODEL}.get(options.kind, options.kind):
        raise ToolError(f"--init {init!r} is of kind {kind}, but --kind is {options.kind}.")
    try:
        check_draft(init, config["vocab_size"], options.target)
    except GSDConfigError as error:
        raise ToolError(str(error).replace('"model"', "--init", 1)) from None
    if kind == LANGUAGE_MODEL:
        return
    draft, layers = read_config(Path(init)), state_layers(config["num_hidden_layers"])
    layers = layers[:EAGLE3_LAYERS] if kind == EAGLE3 else layers
    if not is_speculators(draft):
        raise ToolError(f"--init {init!r} is not in the format of speculators, the only one to train on.")
    if (read := draft.get("eagle_aux_hidden_state_layer_ids") or draft.get("aux_hidden_state_layer_ids")) != layers:
        raise ToolError(f"--init {init!r} reads the target's layers {read}, but drafts are trained on {layers}.")
    if kind == "dspark" and (differing := _untrained(draft)):
        raise ToolError(
            f"--init {init!r} cannot be trained further, because of {', '.join(differing)} in its config.json."
        )


def _untrained(draft: dict[str, Any]) -> list[str]:
    """The keys of a block's config.json by which it differs from the blocks that ``blocks`` computes."""
    layer = draft["transformer_layer_config"]
    fits = {
        "sample_from_anchor": draft.get("sample_from_anchor", True),
        "markov_rank": draft.get("markov_rank", 1),
        "enable_confidence_head": not draft.get("enable_confidence_head", True),
        "layer_types": "sliding_attention" not in (layer.get("layer_types") or ()),
        "use_sliding_window": not layer.get("use_sliding_window"),
    }
    return [f'"{name}"' for name, holds in fits.items() if not holds]


def _check_data(data: Path, target: Path, config: dict[str, Any]) -> None:
    """Refuse answers of another target: by the options of the run that made them, or by the shape of its states."""
    if not _files_of_answers(data):
        raise ToolError(f"--data {str(data)!r} has no answers/*.parquet; give the work folder of another run.")
    made_by = _options_of(data).get("target")
    if made_by is not None and Path(made_by).resolve() != target.resolve():
        raise ToolError(f"--data {str(data)!r} has answers of {made_by!r}, but --target is {str(target)!r}.")
    expected = len(state_layers(config["num_hidden_layers"])), config["hidden_size"]
    for file in sorted((data / "states").glob("*.safetensors")):
        if (found := stored_shape(file)) != expected:
            raise ToolError(
                f"--data {str(data)!r} has states of {found[0]} layers of size {found[1]}, but --target "
                f"{str(target)!r} has {expected[0]} of size {expected[1]}."
            )


def _options_of(work: Path) -> dict[str, Any]:
    """The options of the run in a work folder; empty if they are not known."""
    stored = work / "options.json"
    return json.loads(stored.read_text()) if stored.is_file() else {}


def _files_of_answers(folder: Path) -> list[Path]:
    return sorted((folder / "answers").glob("*.parquet"))


@contextmanager
def _only_run(work: Path) -> Iterator[None]:
    """Hold the work folder.

    Raises:
        ToolError: another run does.
    """
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError(
                f"Another run is working in {str(work)!r}; wait for its end, or give another --work."
            ) from None
        yield


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
        except (SafetensorError, RuntimeError) as error:  # such as a full disk
            if type(error).__name__ == "OutOfMemoryError":  # PyTorch's
                raise ToolError(
                    f"The GPU's memory ran out ({str(error)[:200].rstrip('. ')}); end other programs that use it and "
                    "start the command again to resume, or start a new run with --data and a lower --longest."
                ) from None
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # where torch.save writes
                raise
            reason = str(error).split("\n")[0]
            raise ToolError(
                f"Tensors could not be read or written ({reason}); start the command again to resume."
            ) from None


def _train(
    options: Options, work: Path, states: Path, training: list[Answer], held_out: list[Answer]
) -> dict[str, Any]:
    """Train the student, write it to ``work/trained`` and measure its agreement with the target.

    Only a CPU has ``states``, the folder of the target's states over the answers.
    """
    import numpy as np
    import torch

    from vllm_gsd.tools.distill.data import count_tokens
    from vllm_gsd.tools.distill.hardware import found_hardware
    from vllm_gsd.tools.distill.lm import LanguageModel
    from vllm_gsd.tools.distill.speculators_students import BlockStudent, Eagle3Student
    from vllm_gsd.tools.distill.states import ComputedStates, StoredStates
    from vllm_gsd.tools.distill.target import Target
    from vllm_gsd.tools.distill.train import train
    from vllm_gsd.tools.distill.validate import agreement

    torch.compiler.set_stance("force_eager")  # speculators compiles on GPUs, for each size of a batch again
    folder, (device, dtype, *_) = Path(options.target), found_hardware()
    with stage("loading the target and making the student"):
        target = Target(folder, device, dtype)
        counts = count_tokens(training, target.config["vocab_size"])
        if (ends := target.config.get("eos_token_id")) is not None:
            counts[ends] = counts.max() + 1
        kinds: dict[str, Any] = {"dspark": BlockStudent, "eagle3": Eagle3Student, "lm": LanguageModel}
        model = kinds[options.kind].make(options, target, np.argsort(-counts, kind="stable"))
        packs = model.packs(StoredStates(states) if device == "cpu" else ComputedStates(folder, device, dtype=dtype))
    share = TRAINING_SHARE if options.data is None else ANSWERS_SHARE + TRAINING_SHARE
    limit = None if options.minutes is None else options.minutes * share
    with stage("the student's first weights"):
        model.start(training, packs, options.init is None)
    steps = train(model, work, training, packs, options, limit)
    model.save(work / "trained")
    with stage("measuring agreement"):
        found = agreement(model, held_out, packs)
    own = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {**found, "steps": steps, "batch": model.batch, "trained": own, "vocab_size": len(model.token_ids)}


def _learned_from(options: Options, answers: Path) -> str:
    """Whose requests were answered, and which draft the run began with, for the model card."""
    made_by, own = _options_of(answers), answers / "own.json"
    if asked := made_by.get("prompts"):
        text = f"to {Path(asked).name}"
    elif made_by:
        has_own = own.is_file() and json.loads(own.read_text())
        text = "to templates and its own requests" if has_own else "to templates"
    else:
        text = "to requests that are not known"
    if options.init is not None:
        text += f"; begun from the draft {Path(options.init).name!r}, whose own training is not counted"
    return text


def _finish(
    options: Options, answers: Path, work: Path, out: Path, training: list[Answer], results: dict[str, Any]
) -> None:
    facts = {
        "target": Path(options.target).absolute().name,
        "name": out.name,
        "kind": options.kind,
        "answers": len(training),
        "tokens": sum(len(answer.input_ids) - answer.prompt_len for answer in training),
        "prompts": _learned_from(options, answers),
        "command": shlex.join(["vllm-gsd", *sys.argv[1:]]),
    }
    # Beside the result, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        making = Path(folder, out.name)
        shutil.copytree(work / "trained", making)
        write_card(making, facts, results)
        if out.exists():
            out.rmdir()
        making.rename(out)
