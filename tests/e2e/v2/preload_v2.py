"""Imported by nothing but the process that V2 engines are forked from."""

import interpreter

interpreter.enable()

import engine_process  # noqa: E402, F401  (imports vLLM there)
