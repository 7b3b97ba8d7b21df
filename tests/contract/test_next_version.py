"""The contracts of ``test_upstream`` against the sources of the next vLLM, read and not imported.

``scripts/fetch_vllm_sources`` downloads them; ``VLLM_SOURCES=.../vllm`` names those of another version instead.
``test_upstream_v2`` reads them too. What differs is told apart in ``vllm_gsd/upstream``.
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


def read_from_vllm() -> set[str]:
    """Every symbol that our code imports from vLLM's modules, or reads off modules of vLLM that it imports.

    They are looked for where they are defined or imported by name: ours are not taken from a module's ``import *``.
    """
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
    """Whether the installed vLLM has such a module, which need not be imported: some must be by their worker."""
    file = Path(vllm.__file__).parents[1].joinpath(*path.split("."))
    return file.is_dir() or file.with_suffix(".py").exists()


@pytest.mark.parametrize("symbol", sorted(read_from_vllm()))
def test_what_is_read_is_there(next_sources, symbol):
    module, _, name = symbol.rpartition(".")
    row = PATCHES[0]._replace(symbol=f"{module}:{name}", kind="attribute", parameters=())
    assert problem_in(row, Path(next_sources)) is None


def test_grammar_masks_are_filled_as_one_of_two_versions_does(next_sources):
    """``upstream.structured`` knows them."""
    text = Path(next_sources, "v1/structured_output/__init__.py").read_text()
    of_0_32 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool]]" in text
    of_0_33 = "batch: Iterable[tuple[StructuredOutputGrammar, int, bool, tuple[int, ...]]]" in text
    assert of_0_32 != of_0_33
    assert of_0_33 == ("def _masked_reasoning_ends(" in text)
    assert of_0_33 == ("cumulative_index = grammar_idx * mask_stride" in text)
