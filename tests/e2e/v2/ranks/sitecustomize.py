"""Enables the interpreter in every Python process that has this folder on its path, such as new ranks of vLLM."""

import interpreter

interpreter.enable()
