"""Checks that only ``vllm_gsd/upstream`` changes other packages, and that only its ``wire`` contains ``WIRE_NAMES``.

The owner of an assigned object follows from its origin: imports, parameters, inherited attributes, and locals bound to
these. An object that we create (by calling a class, ``from_...`` or ``copy``) is ours, and so is a parameter annotated
with one of our classes. What our own functions return counts as ours. ``LIBRARIES`` lists what the packages without an
engine may import. Needs only the standard library.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "vllm_gsd"
ROOT = Path(__file__).resolve().parents[1]
# In these packages, functions named ``register...`` modify a table. Methods of that name do so in the first two.
REGISTRIES = {"vllm", "ray", "transformers"}
ENGINES = {"vllm", "ray"}
# Modules that may only be imported by statements, which import-linter sees. Our compiled ones may be missing.
HIDDEN_IMPORTS = re.compile(rf"({'|'.join(sorted(REGISTRIES))})\b|{PACKAGE}\.[^_]")
# Functions that import a module, or an object of one, by its name.
IMPORTERS = ("import_module", "__import__", "resolve_name", "resolve_obj_by_qualname", "run_module")
# The names in ``wire`` of our attributes of vLLM's objects and of our keys; no other module may contain them, nor paths
# of our classes.
_CARRIED = set(re.findall(r'= "(gsd_\w+)"', (ROOT / PACKAGE / "upstream/wire.py").read_text("utf-8")))
WIRE_NAMES = re.compile(rf"{PACKAGE}(\.\w+)*\.[A-Z]\w*|{'|'.join(sorted(_CARRIED))}")
# The libraries that packages may import, besides the standard library.
LIBRARIES = {
    "config": {"huggingface_hub", "numpy", "pydantic"},
    "method": {"numpy"},
    "planner": {"numpy"},
    "ops": {"numpy", "torch", "triton", "xformers"},
}

# Parameters with these names are vLLM's.
RECORDS = {"attn_metadata", "manager", "model_runner_output", "request", "runner", "scheduler_output", "vllm_config"}

# Methods that change a container.
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
# Functions and methods that set attributes or elements by name.
SETTERS = {"__setattr__", "__delattr__", "__setitem__", "__delitem__", "setattr", "delattr", "setitem", "delitem"}
# Built-in functions whose result is, or holds, what they are given.
PASSING = {"cast", "enumerate", "filter", "getattr", "iter", "list", "next", "reversed", "set", "sorted", "tuple"}
PASSING |= {"type", "vars", "zip"}

OURS, UNKNOWN, IMPORTED, THEIRS = "ours", "unknown", "imported", "theirs"


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


def foreign_imports(source: str, libraries: set[str]) -> list[tuple[int, str]]:
    """Lines and names of the imports of other libraries, also inside functions."""
    allowed = libraries | {PACKAGE, *sys.stdlib_module_names}
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        found += [(node.lineno, name) for name in names if name.partition(".")[0] not in allowed]  # type: ignore[attr-defined]
    return found


class _Module(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: set[Violation] = set()
        self.scopes: list[dict[str, str]] = [{}]  # origin of each name, innermost scope last
        self.attributes: list[
            dict[str, str]
        ] = []  # origin of each attribute of ``self``, by class; "" stands for inherited ones
        self.functions: list[str] = []
        self.registries: set[str] = set()  # names of registering functions
        self.engines: set[str] = set()  # names from ``ENGINES``
        self.importers: set[str] = set(IMPORTERS)
        self.constants: dict[str, str] = {}  # strings of the module, by name

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
        if isinstance(node, ast.IfExp):
            return self.worst([node.body, node.orelse])
        if isinstance(node, ast.BoolOp):
            return self.worst(node.values)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return self.worst(node.elts)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self.of_comprehension(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in PASSING and isinstance(node.func, ast.Name):
                return self.worst(node.args)
            made_here = name[:1].isupper() or name.startswith(("from_", "copy", "deepcopy"))
            owner = self.origin(node.func)
            return OURS if made_here else THEIRS if owner == IMPORTED else owner
        return UNKNOWN

    def worst(self, nodes: Iterable[ast.AST]) -> str:
        """The owner of what may be any of these values: another package if one of them is another package's."""
        owners = {THEIRS if (owner := self.origin(node)) == IMPORTED else owner for node in nodes}
        return next((owner for owner in (THEIRS, UNKNOWN, OURS) if owner in owners), UNKNOWN)

    def of_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> str:
        self.scopes.append({})
        for part in node.generators:
            self.bind(part.target, self.worst([part.iter]))
        owner = self.worst([node.elt])
        self.scopes.pop()
        return owner

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
            if package in ENGINES:
                self.engines.add(name)
            if alias.name in IMPORTERS:
                self.importers.add(name)
            if alias.name in SETTERS:
                self.report(node, f"uses {alias.name}")
            if package in ("unittest", "pytest"):
                self.report(node, f"patches with {package}")

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
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child in node.body:
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

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
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

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    # --- changes --------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        if len(self.scopes) == 1 and isinstance(node.targets[0], ast.Name) and _text(node.value):
            self.constants[node.targets[0].id] = _text(node.value)
        for target in node.targets:
            self.check(target)
            self.visit(target)
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
            self.visit(target)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.check(node.target)
        self.bind(node.target, self.worst([node.iter]))
        self.generic_visit(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.check(node.target)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, self.worst([node.value]))
        self.generic_visit(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self.check(item.optional_vars)
                self.bind(item.optional_vars, self.worst([item.context_expr]))
        self.generic_visit(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        method, owner = (node.func.attr, node.func.value) if isinstance(node.func, ast.Attribute) else ("", None)
        *_, root = _chain(node.func)
        name = root.id if isinstance(root, ast.Name) else ""
        if function in ("setattr", "delattr") and node.args and _is_self(node.args[0]):
            for argument in node.args:
                self.visit(argument)
            return
        if function in self.registries or (method.startswith("register") and name in self.engines):
            self.report(node, f"{function}(...)")
        theirs = name in self.engines or (isinstance(owner, ast.Attribute) and name in {"sys", *RECORDS})
        if method in CHANGES and theirs:
            self.report(node, f"{function}(...)")
        if function == "vars" and self.worst(node.args) == THEIRS:
            self.report(node, f"exposes {ast.unparse(node)}")
        if function.rpartition(".")[2] in self.importers:
            self.check_import(node)
        self.generic_visit(node)

    def check_import(self, node: ast.Call) -> None:
        """Report an import by name that import-linter would forbid, or whose name is not written out."""
        given = node.args[0] if node.args else None
        name = self.constants.get(given.id, "") if isinstance(given, ast.Name) else _text(given)
        if not name or HIDDEN_IMPORTS.match(name):
            self.report(node, f"imports by {ast.unparse(node)}, which import-linter does not see")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in SETTERS:
            self.report(node, f"uses {node.id}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in SETTERS and not _is_self(node.value) and ast.unparse(node.value) != "super()":
            self.report(node, f"uses {ast.unparse(node)}")
        if node.attr == "__dict__" and self.origin(node.value) in (IMPORTED, THEIRS):
            self.report(node, f"exposes {ast.unparse(node)}")
        if node.attr in _CARRIED:
            self.report(node, f"spells {node.attr!r}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and WIRE_NAMES.fullmatch(node.value):
            self.report(node, f"spells {node.value!r}")

    def check(self, target: ast.AST) -> None:
        """Report a target that belongs to another package."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.check(part)
        elif isinstance(target, ast.Starred):
            self.check(target.value)
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


def _text(node: ast.AST | None) -> str:
    """The value of a string constant, that of an f-string up to its first expression and "*", else an empty string."""
    if isinstance(node, ast.JoinedStr) and node.values and (text := _text(node.values[0])):
        return f"{text}*"
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
        libraries = LIBRARIES.get(file.relative_to(root / PACKAGE).parts[0])
        for line, library in foreign_imports(file.read_text("utf-8"), libraries) if libraries else ():
            print(f"{file.relative_to(root)}:{line}: imports {library}, which this package must not need")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
