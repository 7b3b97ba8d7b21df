"""Whether the installed vLLM has what the inventory names, and has it of the expected kind."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_gsd.upstream.inventory import Patch

_MISSING = object()


def problem_with(patch: Patch, load: bool = True) -> str | None:
    """What is wrong with the symbol of a patch, as the end of a sentence that begins with "vLLM 0.32"; None: nothing.

    Args:
        load: import the symbol's module. Else it is read, unless it is imported already: importing a worker's modules
            takes seconds, and may be wrong in a process that is no worker.
    """
    module = sys.modules.get(patch.module)
    if module is None and load:
        try:
            module = importlib.import_module(patch.module)
        except Exception as error:  # whatever a module of another version raises when it is imported
            first_line = next(iter(str(error).splitlines()), "")
            return f"has no module {patch.module} that can be imported ({type(error).__name__}: {first_line})"
    found = _read(patch) if module is None else _find(module, patch.path)
    if found is _MISSING:
        return f"has no {patch.dotted}"
    if not _is_kind(found, patch.kind):
        return f"has a {patch.dotted} that is not a {patch.kind}"
    for name in patch.parameters:
        if not _takes(found, name):
            return f'has a {patch.dotted} without the parameter "{name}"'
    return None


def owner_of(patch: Patch) -> tuple[Any, str]:
    """The module or class that holds the symbol of a patch, imported, and its name there."""
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
    if found is _MISSING and inspect.isclass(owner):  # a field without a default is no attribute of its class
        annotations = [vars(base).get("__annotations__", {}) for base in owner.__mro__]
        return next((note[name] for note in annotations if name in note), _MISSING)
    return found


# --- symbols of modules that are only read ------------------------------------------------------------


def _read(patch: Patch) -> Any:
    """The node that defines a symbol in the source of its module."""
    package, *parts = patch.module.split(".")
    file = Path(importlib.import_module(package).__path__[0], *parts)
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
    """The statement by which a module or a class defines a name, also within its conditions."""
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


# --- of either ----------------------------------------------------------------------------------------


def _is_kind(found: Any, kind: str) -> bool:
    if kind == "attribute" or isinstance(found, ast.Import | ast.ImportFrom):
        return True
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
        return True  # imported from elsewhere, where it is not looked at
    signature = inspect.signature(found.__func__ if isinstance(found, staticmethod) else found)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds
