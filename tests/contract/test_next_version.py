"""The contracts of ``test_upstream`` against the sources of the next vLLM, read and not imported.

``scripts/fetch_vllm_sources`` downloads them; ``VLLM_SOURCES=.../vllm`` names those of another version instead.
``test_upstream_v2`` reads them too. What differs is told apart in ``vllm_gsd/upstream``.
"""

import ast
import dataclasses
from pathlib import Path

import pytest
import test_upstream

from vllm_gsd.upstream.inventory import PATCHES
from vllm_gsd.upstream.symbols import problem_in


def definition(sources: Path, symbol):
    """The other version's definition of an imported function or class, which may have moved to a base class."""
    path = Path(sources, *symbol.__module__.split(".")[1:])
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
def test_signature(next_sources, function, expected):
    found = definition(next_sources, function).args
    ordered = [*found.posonlyargs, *found.args, found.vararg, *found.kwonlyargs, found.kwarg]
    names = [argument.arg for argument in ordered if argument is not None]
    assert [name for name in names if name not in ("self", "cls")] == expected


# Of the others the definition is no statement of the named class.
READABLE = [
    patch
    for patch in PATCHES
    if patch.module.startswith("vllm.") and patch.module != "vllm.config" and not patch.path.endswith(".__init__")
]
FIELDS = next(mark for mark in test_upstream.test_fields.pytestmark if mark.name == "parametrize").args[1]


@pytest.mark.parametrize(("cls", "needed"), FIELDS)
def test_fields(next_sources, cls, needed):
    def fields(kind) -> set[str]:
        own = {node.target.id for node in definition(next_sources, kind).body if isinstance(node, ast.AnnAssign)}
        bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base)]
        return own.union(*map(fields, bases))

    assert needed <= fields(cls)


@pytest.mark.parametrize("patch", READABLE, ids=lambda patch: patch.symbol)
def test_what_is_changed_is_there(next_sources, patch):
    assert problem_in(patch, Path(next_sources)) is None


def test_grammar_masks_are_filled_as_one_of_two_versions_does(next_sources):
    """``upstream.structured`` knows them."""
    text = Path(next_sources, "v1/structured_output/__init__.py").read_text()
    of_0_32 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool]]" in text
    of_0_33 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool, tuple[int, ...]]]" in text
    assert of_0_32 != of_0_33
    assert of_0_33 == ("def _masked_reasoning_ends(" in text)
    assert of_0_33 == ("cumulative_index = grammar_idx * mask_stride" in text)
