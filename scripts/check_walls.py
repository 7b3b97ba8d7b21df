"""Checks that only ``vllm_gsd/upstream`` changes other packages, and that only its ``wire`` contains ``WIRE_NAMES``.

The owner of an assigned object follows from its origin: imports, parameters, inherited attributes, and locals bound to
these. An object that we create (by calling a class, ``from_...`` or ``copy``) is ours, and so is a parameter annotated
with one of our classes. Needs only the standard library.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "vllm_gsd"
ROOT = Path(__file__).resolve().parents[1]
# In these packages, functions named ``register...`` modify a table.
REGISTRIES = {"vllm", "ray", "transformers"}
# Modules that may only be imported by statements, which import-linter sees. Our compiled ones may be missing.
HIDDEN_IMPORTS = re.compile(rf"({'|'.join(sorted(REGISTRIES))})\b|{PACKAGE}\.[^_]")
# Paths of our classes, and our attributes of vLLM's objects. Only ``wire`` may contain these names.
WIRE_NAMES = re.compile(rf"{PACKAGE}(\.\w+)*\.[A-Z]\w*|gsd_(tree_rows|stats|cache_salts|kept|trees|parents|packed_\w+)")

# Parameters with these names are vLLM's.
RECORDS = {"attn_metadata", "manager", "model_runner_output", "request", "runner", "scheduler_output", "vllm_config"}

OURS, IMPORTED, THEIRS, UNKNOWN = "ours", "imported", "theirs", "unknown"


class Violation(NamedTuple):
    """A place that changes an object of another package, or contains one of ``WIRE_NAMES``."""

    line: int
    function: str  # the outermost function, or ""
    what: str


def violations(source: str) -> list[Violation]:
    """The violations in the source of a module."""
    tree = ast.parse(source)
    checker = _Module()
    checker.visit(tree)
    return sorted(checker.found)


class _Module(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: set[Violation] = set()
        self.scopes: list[dict[str, str]] = [{}]  # origin of each name, innermost scope last
        self.attributes: list[
            dict[str, str]
        ] = []  # origin of each attribute of ``self``, by class; "" stands for inherited ones
        self.functions: list[str] = []
        self.registries: set[str] = set()  # names of registering functions

    # --- origins of values ----------------------------------------------------------------------------

    def origin(self, node: ast.AST | None) -> str:
        """The owner of the value of an expression."""
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), UNKNOWN)
        if isinstance(node, ast.Attribute):
            if _is_self(node.value):
                known = self.attributes[-1] if self.attributes else {}
                return known.get(node.attr, known.get("", UNKNOWN))
            return THEIRS if self.origin(node.value) == IMPORTED else self.origin(node.value)
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.origin(node.value)
        if isinstance(node, ast.NamedExpr):
            return self.origin(node.value)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "getattr":
                return self.origin(node.args[0])
            made_here = name[:1].isupper() or name.startswith(("from_", "copy", "deepcopy"))
            owner = self.origin(node.func)
            return OURS if made_here else THEIRS if owner == IMPORTED else owner
        return UNKNOWN

    def bind(self, target: ast.AST, origin: str) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = origin
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.bind(part, origin)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = getattr(node, "module", None)
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            package = (module or alias.name).partition(".")[0]
            self.scopes[-1][name] = OURS if package in (PACKAGE, "__future__") else IMPORTED
            if package in REGISTRIES and alias.name.startswith("register"):
                self.registries.add(name)
            if (module == "unittest" and name == "mock") or (module or alias.name).startswith("unittest.mock"):
                self.report(node, "patches with unittest.mock")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.visit_Import(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bind(ast.Name(node.name), OURS)
        inherits = any(self.origin(base) in (IMPORTED, THEIRS) for base in node.bases)
        self.attributes.append({"": THEIRS} if inherits else {})
        for child in ast.walk(node):
            if isinstance(child, ast.Assign):
                for target in child.targets:
                    self.remember(target, self.origin(child.value))
            elif isinstance(child, ast.AnnAssign):
                annotated = self.annotated(child.annotation)
                self.remember(child.target, annotated if child.value is None else self.origin(child.value))
                if isinstance(child.target, ast.Name) and child in node.body:
                    self.attributes[-1][child.target.id] = annotated
            elif isinstance(child, ast.FunctionDef) and child in node.body:
                self.attributes[-1].setdefault(child.name, UNKNOWN)
        self.generic_visit(node)
        self.attributes.pop()

    def remember(self, target: ast.AST, origin: str) -> None:
        if isinstance(target, ast.Attribute) and _is_self(target.value):
            known = self.attributes[-1]
            if known.get(target.attr, UNKNOWN) == UNKNOWN:
                known[target.attr] = UNKNOWN if origin == IMPORTED else origin
        elif isinstance(target, ast.Tuple):
            for part in target.elts:
                self.remember(part, UNKNOWN)

    def annotated(self, annotation: ast.AST | None) -> str:
        """The owner of a value with this annotation: ours if it names one of our classes."""
        if annotation is None:
            return THEIRS
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        names = [node for node in ast.walk(annotation) if isinstance(node, ast.Name)]
        return OURS if any(self.origin(name) == OURS for name in names) else THEIRS

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not self.attributes or self.functions:
            self.bind(ast.Name(node.name), OURS)
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        scope = {a.arg: self.annotated(a.annotation) for a in named if a is not None and a.arg not in ("self", "cls")}
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.functions.append(node.name)
        self.scopes.append(scope)
        for child in node.body:
            self.visit(child)
        self.scopes.pop()
        self.functions.pop()

    # --- changes --------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.check(target)
            self.bind(target, THEIRS if (owner := self.origin(node.value)) == IMPORTED else owner)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.check(node.target)
        ours = self.annotated(node.annotation) == OURS
        self.bind(node.target, OURS if ours else self.origin(node.value))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.check(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self.check(target)

    def visit_For(self, node: ast.For) -> None:
        self.check(node.target)
        owner = self.origin(node.iter)
        self.bind(node.target, THEIRS if owner == IMPORTED else owner)
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self.check(item.optional_vars)
                self.bind(item.optional_vars, UNKNOWN)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ("setattr", "delattr") and not _is_self(node.args[0]):
            self.report(node, ast.unparse(node))
        if name in self.registries:
            self.report(node, f"{name}(...)")
        if name.endswith(("import_module", "__import__")) and HIDDEN_IMPORTS.match(_text(node.args[0])):
            self.report(node, f"{ast.unparse(node)}, which import-linter does not see")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and WIRE_NAMES.fullmatch(node.value):
            self.report(node, f"spells {node.value!r}")

    def check(self, target: ast.AST) -> None:
        """Report a target that belongs to another package."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.check(part)
        elif isinstance(target, ast.Attribute) and not _is_self(target.value):
            if self.origin(target.value) in (IMPORTED, THEIRS):
                self.report(target, f"{ast.unparse(target)} = ...")
        elif isinstance(target, ast.Subscript):
            *_, root = target, *_chain(target.value)
            parts = [node for node in _chain(target.value) if isinstance(node, ast.Attribute)]
            if _is_self(root):
                own = bool(parts) and parts[-1].attr in self.attributes[-1]
                wrong = len(parts) > 1 if own else self.origin(target.value) == THEIRS
            else:  # elements of arrays may be changed, but not those of vLLM's records
                name = root.id if isinstance(root, ast.Name) else ""
                wrong = self.origin(root) == IMPORTED or (bool(parts) and name in RECORDS)
            if wrong and self.origin(target.value) in (IMPORTED, THEIRS):
                self.report(target, f"{ast.unparse(target)} = ...")

    def report(self, node: ast.AST, what: str) -> None:
        self.found.add(Violation(node.lineno, self.functions[0] if self.functions else "", what))  # type: ignore[attr-defined]


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _text(node: ast.AST) -> str:
    """The value of a string constant, else an empty string."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def main(root: Path = ROOT) -> int:
    """Print every violation. Returns 1 if there are any."""
    count = 0
    for file in sorted((root / PACKAGE).rglob("*.py")):
        if file.is_relative_to(root / PACKAGE / "upstream"):
            continue
        for line, _, what in violations(file.read_text("utf-8")):
            print(f"{file.relative_to(root)}:{line}: {what}: this belongs in {PACKAGE}/upstream")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
