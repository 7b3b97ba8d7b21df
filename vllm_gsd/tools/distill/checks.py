"""What a run refuses before the target answers for hours."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_gsd.config import GSDConfigError
from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.config.draft_kind import LANGUAGE_MODEL, kind_of, read_config
from vllm_gsd.config.speculators_folder import is_speculators
from vllm_gsd.tools.cli.options import flag
from vllm_gsd.tools.distill.options import EAGLE3_LAYERS, NARROWEST, Options
from vllm_gsd.tools.distill.stages import kept, read_json
from vllm_gsd.tools.distill.states import state_layers
from vllm_gsd.tools.distill.target import check_target
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import make_folder
from vllm_gsd.tools.prompt_file import read_requests

# Options of engines, on which no stored result depends. A run resumes with others.
OF_ENGINES = ("engine", "eager")
# Options that are paths, and the name of what is compared beside the options.
PATHS = ("target", "prompts", "data", "init", "teacher")
NAMES = {"prompts_sha256": "the content of --prompts"}


def check_run(options: Options, out: Path, work: Path) -> None:
    """Refuse what cannot work. The options are stored last, so that a mistake in them can be corrected."""
    config = check_target(Path(options.target))
    most, heads, depth = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    if options.kind == "eagle3" and depth < EAGLE3_LAYERS:
        raise ToolError(f"--kind eagle3 reads {EAGLE3_LAYERS} layers, but the target has only {depth}.")
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
    for name in ("init", "teacher"):
        _check_draft(name, options, config)
    if options.prompts is not None:
        read_requests(Path(options.prompts))
    if options.data is not None:
        _check_data(Path(options.data), Path(options.target))
    if out.resolve().is_relative_to(work.resolve()) or work.resolve().is_relative_to(out.resolve()):
        raise ToolError(f'--work "{work}" and --out "{out}" must not contain each other; give another folder.')
    make_folder(out.absolute().parent, "--out")  # the draft is made beside it and then moved
    make_folder(work, "--work")
    given = _comparable(options)
    first = kept(work / "options.json", lambda: given)
    others = [name for name in {**first, **given} if first.get(name, ...) != given.get(name, ...)]
    if differing := [NAMES.get(name, flag(name)) for name in others if name not in OF_ENGINES]:
        raise ToolError(
            f"{str(work)!r} holds a run with other options ({', '.join(differing)}); give another --work, with --data "
            f"{first.get('data') or str(work)!r} for the same answers, or delete it."
        )


def _comparable(options: Options) -> dict[str, Any]:
    """The options as a resumed run compares them: paths wherever it is started, and requests by their content."""
    given: dict[str, Any] = asdict(options)
    for name in PATHS:
        given[name] = given[name] and str(Path(given[name]).resolve())
    if options.prompts is not None:
        given["prompts_sha256"] = hashlib.sha256(Path(options.prompts).read_bytes()).hexdigest()
    return given


def _check_draft(name: str, options: Options, config: dict[str, Any]) -> None:
    """Refuse a draft, given as option ``name``, of another kind or for another target."""
    if (folder := getattr(options, name)) is None:
        return
    given = f"{flag(name)} {folder!r}"
    if not (Path(folder) / "config.json").is_file():
        raise ToolError(f"{given} is not a folder with a config.json; give the folder of a draft.")
    kind = kind_of(Path(folder))
    if kind != {"lm": LANGUAGE_MODEL}.get(options.kind, options.kind):
        raise ToolError(f"{given} is of kind {kind}, but --kind is {options.kind}.")
    try:
        check_draft(folder, config["vocab_size"], options.target)
    except GSDConfigError as error:
        raise ToolError(str(error).replace('"model"', flag(name), 1)) from None
    draft, layers = read_config(Path(folder)), state_layers(config["num_hidden_layers"])
    layer = draft.get("transformer_layer_config", {})
    own = (layer or draft).get("num_hidden_layers", 0)
    merged = name == "init" and options.layers not in (None, own)
    if merged and options.layers > own:
        raise ToolError(f"--layers is {options.layers}, but {given} has only {own} to keep.")
    if kind == LANGUAGE_MODEL:
        return
    if not is_speculators(draft):
        raise ToolError(f"{given} is not in the format of speculators, the only one to train on.")
    # The layers whose states there are, and what the students of ``speculators_students`` compute.
    if options.kind == "eagle3":
        read = "eagle_aux_hidden_state_layer_ids"
        holds = {read: draft.get(read) == layers[:EAGLE3_LAYERS]}
    else:
        holds = {
            "aux_hidden_state_layer_ids": draft.get("aux_hidden_state_layer_ids") == layers,
            "sample_from_anchor": draft.get("sample_from_anchor", True),
            "markov_rank": draft.get("markov_rank", 1),
            "enable_confidence_head": not draft.get("enable_confidence_head", True),
            "layer_types": "sliding_attention" not in (layer.get("layer_types") or ()),
            "use_sliding_window": not layer.get("use_sliding_window"),
            "attention_bias": not (merged and layer.get("attention_bias")),  # see merge_layers
        }
    differing = ", ".join(f'"{key}"' for key, fits in holds.items() if not fits)
    if differing:
        raise ToolError(f"{given} does not fit, because of {differing} in its config.json.")
    if name == "teacher":
        tokens = options.value("depth") if options.init is None else read_config(Path(options.init)).get("block_size")
        if (own := draft.get("block_size")) != tokens:
            raise ToolError(f"{given} has blocks of {own} tokens, but the draft's have {tokens}.")


def _check_data(data: Path, target: Path) -> None:
    """Refuse what is not a run's work folder, and answers of another target."""
    for name in ("answers/*.parquet", "options.json"):
        if not any(data.glob(name)):
            raise ToolError(f"--data {str(data)!r} has no {name}; give the work folder of another run.")
    made_by = read_json(data / "options.json")["target"]
    if Path(made_by).resolve() != target.resolve():
        raise ToolError(f"--data {str(data)!r} has answers of {made_by!r}, but --target is {str(target)!r}.")
