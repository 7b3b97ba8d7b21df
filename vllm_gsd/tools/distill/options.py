"""The options of ``vllm-gsd distill``, each with its type, default and help."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option


class DistillError(ValueError):
    """The run is not possible as asked. The message is one sentence."""


@dataclass(frozen=True)
class Options:
    """What a run was asked for. The command ``vllm-gsd distill`` takes its options from these fields."""

    target: Annotated[str, Option(metavar="PATH", help="Folder of the target, a Llama-like model.")]
    prompts: Annotated[
        str | None,
        Option(metavar="PATH", help='Requests: one JSON object per line with "prompt", "turns" or "messages".'),
    ] = None
    answers: Annotated[int, Option(min=1, help="Number of the target's answers to learn from.")] = 8192
    max_tokens: Annotated[int, Option(min=2, help="Maximum tokens of an answer.")] = 160
    longest: Annotated[int, Option(min=16, help="Maximum tokens of request and answer; longer ones are left out.")] = (
        640
    )
    minutes: Annotated[float | None, Option(help="Time limit; it reduces answers and training steps.")] = None
    params: Annotated[int | None, Option(help="Make a model with at most this many parameters.")] = None
    cost: Annotated[float | None, Option(help="Make a model that reads at most this share of the target.")] = None
    layers: Annotated[str, Option(help='Make a model of these layers of the target, such as "0,1,29".')] = ""
    init: Annotated[str | None, Option(metavar="PATH", help="Continue training this draft.")] = None
    eagle: Annotated[
        bool | None,
        Option(help="One layer on the target's hidden states: the default without --params, --cost and --layers."),
    ] = None
    vocab_size: Annotated[int, Option(min=256, help="Number of tokens that the LM head computes.")] = 12288
    epochs: Annotated[float, Option(help="Passes over the answers.")] = 6.0
    learning_rate: float = 1e-3
    batch: Annotated[int, Option(min=1, help="Concurrent requests while the target answers.")] = 96
    seed: int = 0
    engine: Annotated[bool, Option(help="Measure the draft in the real engine at the end.")] = True
    eager: Annotated[
        bool, Option("--eager", help="Run engines without torch.compile. They start sooner and run slower.")
    ] = False

    @property
    def own_layers(self) -> tuple[int, ...]:
        """``layers`` as integers.

        Raises:
            DistillError: it is not a list of numbers.
        """
        try:
            return tuple(int(layer) for layer in self.layers.split(",")) if self.layers else ()
        except ValueError:
            raise DistillError(
                f'--layers is "{self.layers}", but must be layers of the target separated by commas.'
            ) from None
