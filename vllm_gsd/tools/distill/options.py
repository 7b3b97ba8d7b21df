"""The options of ``vllm-gsd distill``, each with its type, default and help."""

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from vllm_gsd.tools.cli.options import flag, positive
from vllm_gsd.tools.errors import ToolError

KINDS = ("dspark", "eagle3", "lm")
# The defaults of the options that differ between the kinds of drafts or that only some of them have.
BY_KIND: dict[str, dict[str, Any]] = {
    "vocab_size": {"dspark": 8192, "eagle3": 8192, "lm": 12288},
    "layers": {"dspark": 1, "lm": 4},
    "depth": {"dspark": 6, "eagle3": 3},
    "rank": {"dspark": 64},
    "intermediate_size": {"dspark": None},
    "teacher": {"dspark": None},
    "width": {"lm": None},
    "learning_rate": {"dspark": 2e-3, "eagle3": 1e-3, "lm": 1e-3},
}
# With ``--init`` the draft has its shape. These options of ``BY_KIND`` can be given all the same.
WITH_INIT = ("learning_rate", "layers", "teacher")
# The defaults of the options for new answers, which ``--data`` replaces.
ANSWERING = {"answers": 8192, "max_tokens": 256}

# Without the requirements of speculators, which replace torch, torchvision and torchaudio.
INSTALL = "pip install 'vllm-gsd[distill]' && pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0"
# Numbers in an attention head of a language model, whose width is a multiple of it.
HEAD_SIZE = 32
NARROWEST = 64  # numbers in the states of a language model
# The number of layers whose states vLLM reads for EAGLE-3 heads in the speculators package's format.
EAGLE3_LAYERS = 3


def _usual(name: str) -> str:
    """The kinds' defaults of an option, for its help."""
    return "by default " + ", ".join(f"{value} ({kind})" for kind, value in BY_KIND[name].items())


@dataclass(frozen=True)
class Options:
    """What a run was asked for. The command ``vllm-gsd distill`` takes its options from these fields."""

    target: Annotated[str, Option(metavar="PATH", help="Folder (no hub id) of the target, a Llama-like model.")]
    kind: Annotated[
        str, Option(metavar="|".join(KINDS), help="A block of tokens per pass, an EAGLE-3 head, or a language model.")
    ] = "dspark"
    prompts: Annotated[
        str | None, Option(metavar="PATH", help='Requests: lines of JSON with "prompt", "turns" or "messages".')
    ] = None
    data: Annotated[
        str | None, Option(metavar="PATH", help="Work folder of another run, whose answers are learned from.")
    ] = None
    answers: Annotated[
        int | None, Option(min=1, help=f"The target's answers to learn from; by default {ANSWERING['answers']}.")
    ] = None
    max_tokens: Annotated[
        int | None, Option(min=32, help=f"Maximum tokens of an answer; by default {ANSWERING['max_tokens']}.")
    ] = None
    longest: Annotated[
        int, Option(min=128, help="Maximum tokens of request and answer; what an answer has beyond them is cut off.")
    ] = 1024
    minutes: Annotated[
        float | None, Option(callback=positive, help="Time limit; it reduces answers and training steps.")
    ] = None
    init: Annotated[
        str | None, Option(metavar="PATH", help="Continue training this draft of the same kind, of an earlier run.")
    ] = None
    teacher: Annotated[
        str | None, Option(metavar="PATH", help="A block of as many tokens from which a block learns, too.")
    ] = None
    vocab_size: Annotated[
        int | None, Option(min=256, help=f"Number of tokens that the LM head computes; {_usual('vocab_size')}.")
    ] = None
    layers: Annotated[
        int | None, Option(min=1, help=f"Layers of the draft; {_usual('layers')}. With --init, how many they become.")
    ] = None
    depth: Annotated[
        int | None, Option(min=1, max=32, help=f"Tokens of a block, or levels a head learns in; {_usual('depth')}.")
    ] = None
    rank: Annotated[int | None, Option(min=1, help=f"Rank of the bias for the token before; {_usual('rank')}.")] = None
    intermediate_size: Annotated[
        int | None, Option(min=1, help="Width of the MLP in a block's layers; by default the target's.")
    ] = None
    width: Annotated[
        int | None, Option(min=NARROWEST, help=f"Hidden size, a multiple of {HEAD_SIZE}; else a third of the target's.")
    ] = None
    epochs: Annotated[float, Option(callback=positive, help="Passes over the answers.")] = 6.0
    learning_rate: Annotated[
        float | None, Option(callback=positive, help=f"Highest rate of the schedule; {_usual('learning_rate')}.")
    ] = None
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of requests, sampling and training.")] = 0
    engine: Annotated[bool, Option(help="Measure the draft in the real engine at the end.")] = True
    eager: Annotated[bool, Option("--eager", help="Run engines without torch.compile: sooner, but slower.")] = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ToolError(f'--kind is "{self.kind}", but must be one of {", ".join(KINDS)}.')
        lacking = [name for name, kinds in BY_KIND.items() if self.kind not in kinds]
        refused = dict.fromkeys(lacking, f"A draft of kind {self.kind} has no {{}}")
        if self.init is not None:
            refused |= dict.fromkeys(BY_KIND.keys() - {*WITH_INIT}, "With --init the draft keeps its own {}")
        if self.data is not None:
            refused |= dict.fromkeys(("prompts", *ANSWERING), "With --data there are no new answers for {}")
        for name, reason in sorted(refused.items()):
            if getattr(self, name) is not None:
                raise ToolError(f"{reason.format(flag(name))}; leave it out.")
        if self.width is not None and self.width % HEAD_SIZE:
            raise ToolError(f"--width is {self.width}, but must be a multiple of {HEAD_SIZE}.")

    def value(self, name: str) -> Any:
        """The value of an option in ``BY_KIND`` or ``ANSWERING``: what was given, or the default."""
        given = getattr(self, name)
        return given if given is not None else ANSWERING[name] if name in ANSWERING else BY_KIND[name][self.kind]
