"""Checks that the installed vLLM has the symbols of the inventory, each of the expected kind."""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_gsd.upstream.patch import Patch

_MISSING = object()


def problem_with(patch: Patch, load: bool = True) -> str | None:
    """Describe what is wrong with a symbol.

    Args:
        load: whether to import the symbol's module. If False, and the module is not imported yet, its source is parsed
            instead: importing a worker's modules takes seconds and may have side effects in other processes.

    Returns:
        The end of a sentence that starts with "vLLM 0.32", or None if nothing is wrong.
    """
    module = sys.modules.get(patch.module)
    if module is None and load:
        try:
            module = importlib.import_module(patch.module)
        except Exception as error:  # a module of another version may raise anything
            first_line = next(iter(str(error).splitlines()), "")
            return f"has no module {patch.module} that can be imported ({type(error).__name__}: {first_line})"
    return _problem(patch, _read(patch) if module is None else _find(module, patch.path))


def problem_in(patch: Patch, sources: Path) -> str | None:
    """Like :func:`problem_with`, for the sources of another vLLM in the folder ``sources``."""
    return _problem(patch, _read(patch, sources))


def _problem(patch: Patch, found: Any) -> str | None:
    if found is _MISSING:
        return f"has no {patch.dotted}"
    if not _is_kind(found, patch.kind):
        return f"has a {patch.dotted} that is not a {patch.kind}"
    for name in patch.parameters:
        if not _takes(found, name):
            return f'has a {patch.dotted} without the parameter "{name}"'
    return None


def owner_of(patch: Patch) -> tuple[Any, str]:
    """Import the module or class that holds a symbol; returns it and the symbol's name in it."""
    owner: Any = importlib.import_module(patch.module)
    *parents, name = patch.path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


# --- symbols of imported modules ----------------------------------------------------------------------


def _find(module: ModuleType, path: str) -> Any:
    owner: Any = module
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    found = inspect.getattr_static(owner, name, _MISSING)
    if name in vars(object) and found is vars(object)[name]:  # the __init__ of a class that has none of its own
        found = _MISSING
    if found is _MISSING and inspect.isclass(owner):  # a field without a default
        annotations = [vars(base).get("__annotations__", {}) for base in owner.__mro__]
        return next((note[name] for note in annotations if name in note), _MISSING)
    return found


# --- symbols of modules that are parsed but not imported ----------------------------------------------


def _read(patch: Patch, sources: Path | None = None) -> Any:
    """The syntax node that defines a symbol in the source of its module, in the installed package or in ``sources``."""
    package, *parts = patch.module.split(".")
    file = (sources or Path(importlib.import_module(package).__path__[0])).joinpath(*parts)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not file.exists():
        return _MISSING
    scope: Any = ast.parse(file.read_bytes())
    for name in patch.path.split("."):
        scope = _defined(scope, name)
        if scope is _MISSING:
            return _MISSING
    return scope


def _defined(scope: ast.AST, name: str) -> Any:
    """The statement that defines a name in a module or class, also inside ``if``, ``try`` and ``with``."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                return node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if name in [alias.asname or alias.name for alias in node.names]:
                return node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            found = _defined(node, name)
            if found is not _MISSING:
                return found
    return _MISSING


# --- both ---------------------------------------------------------------------------------------------


def _is_kind(found: Any, kind: str) -> bool:
    if kind == "attribute" or isinstance(found, ast.Import | ast.ImportFrom | ast.Assign):
        return True  # the kind of an imported or computed value is unknown
    if isinstance(found, ast.AST):
        if kind == "class" or not isinstance(found, ast.FunctionDef):
            return kind == "class" and isinstance(found, ast.ClassDef)
        decorators = [ast.unparse(node) for node in found.decorator_list]
        wanted = {"static method": "staticmethod", "property": "property"}.get(kind)
        return wanted in decorators if wanted else not {"staticmethod", "property"} & set(decorators)
    if kind == "class":
        return inspect.isclass(found)
    if kind == "property":
        return isinstance(found, property) and found.fget is not None
    if kind == "static method":
        return isinstance(found, staticmethod)
    return inspect.isroutine(found) and not isinstance(found, staticmethod | classmethod)


def _takes(found: Any, name: str) -> bool:
    if isinstance(found, ast.FunctionDef):
        arguments = found.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return name in [argument.arg for argument in named] or arguments.kwarg is not None
    if isinstance(found, ast.AST):
        return True
    signature = inspect.signature(found.__func__ if isinstance(found, staticmethod) else found)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds
