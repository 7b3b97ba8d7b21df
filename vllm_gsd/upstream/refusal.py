"""Rejects requests for gsd with a clear message if the installed vLLM lacks a symbol that we wrap.

The plugin changes nothing else then. It installs one check for the command line and one for engines, each at the first
of several symbols that exists.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

from vllm_gsd.config import GSDConfigError, is_gsd
from vllm_gsd.upstream import hooks
from vllm_gsd.upstream.inventory import patch_of
from vllm_gsd.upstream.patching import replace
from vllm_gsd.upstream.symbols import problem_with

Maker = Callable[[Any], Any]


def install(sentence: str) -> None:
    """Make vLLM answer every request for gsd with the error message ``sentence``."""
    method = refusing_method(sentence)
    command_line: dict[str, Maker] = {
        "vllm.engine.arg_utils:EngineArgs.add_cli_args": refusing_option(sentence),
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args": refusing_arguments(sentence),
    }
    engines: dict[str, Maker] = {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config": method,
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config": method,
        "vllm.config.speculative:SpeculativeConfig.__init__": refusing_method(sentence, given_keys=True),
    }
    for places in (command_line, engines):
        for symbol, make in places.items():
            if problem_with(patch_of(symbol)) is None:
                replace(symbol, make)
                break


def refusing_option(sentence: str) -> Maker:
    """Wrapper of ``EngineArgs.add_cli_args`` that rejects gsd."""

    def parse(upstream_type: Callable[[str], Any], value: str) -> Any:
        if _asks_for_gsd(value):
            raise argparse.ArgumentTypeError(sentence)
        return upstream_type(value)

    return lambda upstream: hooks.with_option_type(upstream, parse)


def refusing_arguments(sentence: str) -> Maker:
    """Wrapper of ``FlexibleArgumentParser.parse_args`` that rejects gsd."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def parse_args(
            self: argparse.ArgumentParser, args: list[str] | None = None, *others: Any, **kwargs: Any
        ) -> argparse.Namespace:
            given = sys.argv[1:] if args is None else args
            for argument, following in itertools.pairwise([*given, ""]):
                name, equals, value = argument.partition("=")
                ours = name.replace("_", "-") in ("--speculative-config", "-sc")
                if ours and _asks_for_gsd(value if equals else following):
                    self.error(sentence)
            return upstream(self, args, *others, **kwargs)

        return parse_args

    return make


def refusing_method(sentence: str, given_keys: bool = False) -> Maker:
    """Wrapper of a method that rejects gsd in its object's ``speculative_config``, or in the keys that it is given."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _asks_for_gsd(kwargs if given_keys else self.speculative_config):
                raise GSDConfigError(sentence)
            return upstream(self, *args, **kwargs)

        return method

    return make


def _asks_for_gsd(value: Any) -> bool:
    """Whether a speculative config asks for gsd. Upstream reports values that we cannot read."""
    try:
        return value is not None and is_gsd(value)
    except GSDConfigError:
        return False
