"""Tells whoever asks for gsd why it is off, where the installed vLLM lacks a symbol that we wrap.

Nothing else is changed then. Of the places where a request for gsd can be seen the first that is there is taken, one
for the command line and one for engines.
"""

from __future__ import annotations

import argparse
import functools
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
    """Answer a request for gsd with a sentence."""
    method = refusing_method(sentence)
    command_line: dict[str, Maker] = {
        "vllm.engine.arg_utils:EngineArgs.add_cli_args": refusing_option(sentence),
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args": refusing_arguments(sentence),
    }
    engines: dict[str, Maker] = {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config": method,
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config": method,
        "vllm.config.speculative:SpeculativeConfig.__init__": refusing_keys(sentence),
    }
    for places in (command_line, engines):
        for symbol, make in places.items():
            if problem_with(patch_of(symbol)) is None:
                replace(symbol, make)
                break


def refusing_option(sentence: str) -> Maker:
    """Of ``EngineArgs.add_cli_args``."""

    def parse(upstream_type: Callable[[str], Any], value: str) -> Any:
        if _asks_for_gsd(value):
            raise argparse.ArgumentTypeError(sentence)
        return upstream_type(value)

    return lambda upstream: hooks.with_option_type(upstream, parse)


def refusing_arguments(sentence: str) -> Maker:
    """Of ``FlexibleArgumentParser.parse_args``."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def parse_args(self, args=None, *others, **kwargs):
            given = sys.argv[1:] if args is None else args
            for argument, following in zip(given, [*given[1:], ""], strict=True):
                name, equals, value = argument.partition("=")
                ours = name.replace("_", "-") in ("--speculative-config", "-sc")
                if ours and _asks_for_gsd(value if equals else following):
                    self.error(sentence)
            return upstream(self, args, *others, **kwargs)

        return parse_args

    return make


def refusing_method(sentence: str) -> Maker:
    """Of a method of ``EngineArgs`` that is called for every engine."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def method(self, *args, **kwargs):
            if _asks_for_gsd(self.speculative_config):
                raise GSDConfigError(sentence)
            return upstream(self, *args, **kwargs)

        return method

    return make


def refusing_keys(sentence: str) -> Maker:
    """Of ``SpeculativeConfig.__init__``."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def init(self, *args, **kwargs):
            if _asks_for_gsd(kwargs):
                raise GSDConfigError(sentence)
            upstream(self, *args, **kwargs)

        return init

    return make


def _asks_for_gsd(value: Any) -> bool:
    """Whether a speculative config is ours; what we cannot read is left for upstream to complain about."""
    try:
        return value is not None and is_gsd(value)
    except GSDConfigError:
        return False
