"""Checks the contracts of ``test_upstream`` on the sources of the next vLLM, without importing it.

``scripts/fetch_vllm_sources`` downloads the sources; ``VLLM_SOURCES=.../vllm`` names those of another version.
``test_upstream_v2`` reads them, too. ``vllm_gsd/upstream`` handles the differences between versions.
"""

import ast
import dataclasses
from pathlib import Path

import pytest
import test_upstream
import vllm

import vllm_gsd
from vllm_gsd.upstream.inventory import PATCHES
from vllm_gsd.upstream.symbols import problem_in


def definition(sources: Path, symbol):
    """The other version's definition of a function or class that is imported from the installed vLLM."""
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
        node = named[-1]  # a property may be defined several times
    return node


@pytest.mark.parametrize(
    ("function", "expected"), test_upstream.SIGNATURES, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_signature(next_sources, function, expected):
    arguments = definition(next_sources, function).args
    ordered = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    names = [argument.arg for argument in ordered if argument is not None]
    assert [name for name in names if name not in ("self", "cls")] == expected


# Patches whose symbol is defined by a statement in the named module or class. The others cannot be checked by reading.
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


def read_from_vllm() -> set[str]:
    """All symbols that our code imports from vLLM, or reads as attributes of modules that it imports from vLLM."""
    symbols = set()
    for file in Path(vllm_gsd.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm.")]
        names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        modules = {name for name, path in names.items() if is_module(path)}
        symbols |= {names[name] for name in names.keys() - modules}
        symbols |= {
            f"{names[node.value.id]}.{node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        }
    return symbols


def is_module(path: str) -> bool:
    """Whether the installed vLLM has this module. Does not import it, because only workers may import some modules."""
    file = Path(vllm.__file__).parents[1].joinpath(*path.split("."))
    return file.is_dir() or file.with_suffix(".py").exists()


@pytest.mark.parametrize("symbol", sorted(read_from_vllm()))
def test_what_is_read_is_there(next_sources, symbol):
    module, _, name = symbol.rpartition(".")
    row = PATCHES[0]._replace(symbol=f"{module}:{name}", kind="attribute", parameters=())
    assert problem_in(row, Path(next_sources)) is None


def test_grammar_masks_are_filled_as_one_of_two_versions_does(next_sources):
    """The next version fills masks like 0.32 or like 0.33, both of which ``upstream.structured`` supports."""
    text = Path(next_sources, "v1/structured_output/__init__.py").read_text()
    of_0_32 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool]]" in text
    of_0_33 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool, tuple[int, ...]]]" in text
    assert of_0_32 != of_0_33
    assert of_0_33 == ("def _masked_reasoning_ends(" in text)
    assert of_0_33 == ("cumulative_index = grammar_idx * mask_stride" in text)
