"""The record of one change that this plugin makes to vLLM."""

from typing import Literal, NamedTuple

# When a change is made:
# "load": when vLLM loads the plugin.
# "fallback": when the plugin loads, but only to reject gsd because another symbol is missing.
# "engine": when an engine with gsd starts; "v1" to "Ray" do so only for one model runner, device or executor.
# "tools": when one of our command-line tools runs.
When = Literal["load", "fallback", "engine", "v1", "v2", "v2 on a CPU", "CPU", "Ray", "tools"]
Kind = Literal["attribute", "class", "function", "method", "property", "static method"]


class Patch(NamedTuple):
    """One vLLM symbol that the plugin wraps, replaces or assigns to."""

    symbol: str  # "module:qualified name"
    by: str  # the functions of vllm_gsd.upstream that make the change, as "module.function", separated by spaces
    when: When
    delta: str
    reason: str
    expiry: str
    contract: str  # the test in tests/contract that fails when upstream changes the symbol, as "file::test"
    kind: Kind = "class"
    parameters: tuple[str, ...] = ()  # the parameters of a function that we rely on

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def path(self) -> str:
        return self.symbol.partition(":")[2]

    @property
    def dotted(self) -> str:
        """The symbol as a dotted path, for messages and documentation."""
        return self.symbol.replace(":", ".")
