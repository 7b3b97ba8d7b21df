"""The contracts of ``test_upstream`` against the sources of another vLLM, read and not imported.

    VLLM_SOURCES=.../vllm python -m pytest tests/contract

where the folder is that of a wheel's Python files (``pip download vllm==0.33.0 --no-deps``, then unzip).
``test_upstream_v2`` reads them too. What differs is told apart in ``vllm_gsd/upstream``.
"""

import ast
import dataclasses
import os
from pathlib import Path

import pytest
import test_upstream

SOURCES = os.environ.get("VLLM_SOURCES")
pytestmark = pytest.mark.skipif(not SOURCES, reason="VLLM_SOURCES does not name another vLLM's sources")


def definition(symbol):
    """The other version's definition of an imported function or class, which may have moved to a base class."""
    path = Path(SOURCES, *symbol.__module__.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    node: ast.AST = ast.parse(path.read_text())
    for part in symbol.__qualname__.split("."):
        named = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name == part
        ]
        assert named, f"{path} has no {symbol.__qualname__} any more"
        node = named[-1]  # of a property, its last form
    return node


@pytest.mark.parametrize(
    ("function", "expected"), test_upstream.SIGNATURES, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_signature(function, expected):
    arguments = definition(function).args
    assert [a.arg for a in arguments.posonlyargs + arguments.args if a.arg not in ("self", "cls")] == expected


FIELDS = next(mark for mark in test_upstream.test_fields.pytestmark if mark.name == "parametrize").args[1]


@pytest.mark.parametrize(("cls", "needed"), FIELDS)
def test_fields(cls, needed):
    def fields(kind) -> set[str]:
        own = {node.target.id for node in definition(kind).body if isinstance(node, ast.AnnAssign)}
        bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base)]
        return own.union(*map(fields, bases))

    assert needed <= fields(cls)


def test_grammar_masks_are_filled_as_one_of_two_versions_does():
    """``upstream.structured`` knows them."""
    text = Path(SOURCES, "v1/structured_output/__init__.py").read_text()
    of_0_32 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool]]" in text
    of_0_33 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool, tuple[int, ...]]]" in text
    assert of_0_32 != of_0_33
    assert of_0_33 == ("def _masked_reasoning_ends(" in text)
    assert of_0_33 == ("cumulative_index = grammar_idx * mask_stride" in text)
