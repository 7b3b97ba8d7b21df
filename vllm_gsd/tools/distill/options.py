"""The options of ``vllm-gsd distill``: each one's type, default and help, said once."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option


class DistillError(ValueError):
    """The run cannot be done as asked; the message is one sentence."""


@dataclass(frozen=True)
class Options:
    """What a run was asked for; the command ``vllm-gsd distill`` is made from these fields."""

    target: Annotated[str, Option(metavar="PATH", help="Folder of the target model, Llama-like.")]
    prompts: Annotated[
        str | None,
        Option(metavar="PATH", help='Requests, one JSON object a line with "prompt", "turns" or "messages".'),
    ] = None
    answers: Annotated[int, Option(min=1, help="Answers of the target to learn from.")] = 8192
    max_tokens: Annotated[int, Option(min=2, help="Longest answer.")] = 160
    longest: Annotated[int, Option(min=16, help="Longest request with its answer; longer ones are left out.")] = 640
    minutes: Annotated[float | None, Option(help="Time for all of it; fewer answers and steps where short.")] = None
    params: Annotated[int | None, Option(help="Make a language model of at most so many parameters.")] = None
    cost: Annotated[float | None, Option(help="Most it may read a level, as a share of the target.")] = None
    layers: Annotated[str, Option(help='Make it of the target\'s own layers instead, such as "0,1,29".')] = ""
    init: Annotated[str | None, Option(metavar="PATH", help="Go on training this draft instead of a new one.")] = None
    eagle: Annotated[
        bool | None,
        Option(help="One layer on the target's hidden states. [default without --params, --cost, --layers]"),
    ] = None
    vocab_size: Annotated[int, Option(min=256, help="Tokens that its LM head computes.")] = 12288
    epochs: Annotated[float, Option(help="Passes over the answers.")] = 6.0
    learning_rate: float = 1e-3
    batch: Annotated[int, Option(min=1, help="Requests that the target answers at once.")] = 96
    seed: int = 0
    engine: Annotated[bool, Option(help="Measure the draft in the real engine at the end.")] = True
    eager: Annotated[
        bool, Option("--eager", help="Engines without torch.compile: they start sooner and run slower.")
    ] = False

    @property
    def own_layers(self) -> tuple[int, ...]:
        """``layers`` as numbers.

        Raises:
            DistillError: it is no list of numbers.
        """
        try:
            return tuple(int(layer) for layer in self.layers.split(",")) if self.layers else ()
        except ValueError:
            raise DistillError(
                f'--layers is "{self.layers}", but must be layers of the target separated by commas.'
            ) from None
