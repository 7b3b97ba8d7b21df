"""The options of ``vllm-gsd bench``, each with its type, default and help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vllm_gsd.config import GSDConfig
from vllm_gsd.tools.bench.methods import BY_DEFAULT, METHODS
from vllm_gsd.tools.errors import ToolError

# The keys that --gsd may have; the method and the draft have options of their own.
KEYS = [key for key in GSDConfig.model_fields if key not in ("method", "model")]
# What engines get from the comparison itself.
NOT_ENGINE_ARGS = dict.fromkeys(
    ("model", "max_num_seqs", "speculative_config", "enforce_eager", "disable_log_stats"), "the comparison sets itself"
)

# Tokens of prompt and answer for which engines are made by default.
LONGEST = 2048


@dataclass(frozen=True)
class Options:
    """What a comparison was asked for. The command ``vllm-gsd bench`` takes its options from these fields."""

    prompts: Annotated[
        Path, Argument(help='One JSON object per line with "turns" (Spec-Bench), "messages" or "prompt".')
    ]
    out: Annotated[Path, Option(help="Folder for bench.json and index.html.")] = Path("out/bench")
    target: Annotated[Path | None, Option(help="Folder or hub id of the target; the built-in one if not given.")] = None
    draft: Annotated[
        Path | None, Option(help="Folder or hub id of the draft; the built-in one if no target is given.")
    ] = None
    draft_model: Annotated[
        Path | None,
        Option(
            help="Draft for vLLM's draft_model if --draft is not a language model; the built-in one if no target is "
            "given."
        ),
    ] = None
    methods: Annotated[
        str,
        Option(
            show_default=False,  # it would be cut off
            help=f"Comma-separated: {', '.join(METHODS)}; by default all but kernels. Ratios are over plain, and for "
            "graphs also over gsd-off, our engine without one, which always runs beside them.",
        ),
    ] = ",".join(BY_DEFAULT)
    modes: Annotated[str, Option(help="eager, compiled, or both. With both, the faster one counts.")] = "eager,compiled"
    chain_lengths: Annotated[str, Option(help="Draft lengths to try for vLLM's chains.")] = "1,2,3,4,5,6"
    gsd: Annotated[str, Option(help=f"Keys of gsd.json for all forms of the graph, as JSON: {', '.join(KEYS)}.")] = "{}"
    batch_sizes: Annotated[str, Option(help="Concurrent requests, comma-separated.")] = "1"
    limit: Annotated[int | None, Option(min=1, help="Use at most this many prompts, spread evenly over the file.")] = 12
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of an answer.")] = 96
    repeats: Annotated[int, Option(min=1, help="Turns of each method.")] = 5
    choose_with: Annotated[int, Option(min=1, help="Prompts used to choose the best settings.")] = 4
    dtype: Annotated[str, Option(help="Data type of the target and its draft.")] = "bfloat16"
    max_model_len: Annotated[
        int | None,
        Option(
            min=1, help=f"Maximum tokens of prompt and answer; by default {LONGEST}, or what a shorter target allows."
        ),
    ] = None
    engine_args: Annotated[
        str,
        Option(
            help="More arguments of vLLM's LLM, as JSON. By default every engine gets 1 GiB for keys and values "
            "(kv_cache_memory_bytes) and no prefix caching."
        ),
    ] = "{}"
    apart: Annotated[
        bool, Option("--apart", help="Start a new engine for each turn, if memory cannot hold all engines.")
    ] = False
    contexts: Annotated[
        str, Option(help="Context lengths in tokens, comma-separated: measure how a step grows with them, at batch 1.")
    ] = ""
    forms: Annotated[
        bool, Option("--forms", help="Compare graph, tree and chain in one engine, by category, with bounds.")
    ] = False
    analyses: Annotated[
        bool, Option("--analyses", help="Repeat the paper's ablations and its count of re-occurring n-grams.")
    ] = False


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers of an option, ascending.

    Raises:
        ToolError: it has others.
    """
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ToolError(f'{option} is "{text}", but must be whole numbers above 0 separated by commas.')
    return numbers
