"""Our sampler and our speculator have every attribute that Model Runner V2 reads from them, also in the next version.

``engine.v2.walk.GraphSampler`` replaces vLLM's ``RejectionSampler`` without inheriting from it, and ``GraphSpeculator``
is not a ``DraftModelSpeculator``. So these tests collect every attribute that vLLM's sources read from
``runner.rejection_sampler`` or ``runner.speculator``, and look it up in our classes.
"""

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from test_upstream_v2 import GPU, ROOT, find

PLUGIN = Path(__file__).parents[2] / "vllm_gsd/engine/v2"
OURS = {
    "rejection_sampler": (PLUGIN / "walk.py", "GraphSampler"),
    "speculator": (PLUGIN / "speculator.py", "GraphSpeculator"),
}
# Model Runner V1 has its own rejection sampler, which we never replace.
NOT_V2 = {"v1/worker/gpu_model_runner.py"}
# Conditions under which vLLM reads some attributes, and why they never hold for our classes.
NEVER = {
    "isinstance(self.speculator, DraftModelSpeculator)": "ours is a BaseSpeculator",
    "isinstance(speculator, DraftModelSpeculator)": "ours is a BaseSpeculator",
    "isinstance(self.sampler, GPUWatermarkSampler)": "support.py refuses watermarking",
    "self.adaptive_verification is not None": "our speculator has no enable_adaptive_verification",
    "in maybe_register_speculator": "called for a DraftModelSpeculator only",
}
# Functions among these conditions, and the condition of every call.
NEVER_CALLED = {"maybe_register_speculator": "isinstance(self.speculator, DraftModelSpeculator)"}


class Read(NamedTuple):
    """One read of an attribute of our classes, or a call of the object itself (``__call__``)."""

    owner: str  # key of ``OURS``
    name: str
    place: str  # file and line
    guards: tuple[str, ...]  # conditions that hold at this place
    call: ast.Call | None  # the call, if the attribute is called
    default: bool  # whether vLLM can do without it: ``getattr`` with a default, or ``hasattr``


def owner_of(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The key of ``OURS`` that an expression denotes, if any."""
    if isinstance(node, ast.Attribute) and node.attr in OURS:
        return node.attr
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        name = node.args[1]
        if isinstance(name, ast.Constant) and name.value in OURS:
            return name.value
    return None


class Reader(ast.NodeVisitor):
    """Collects the reads in a module."""

    def __init__(self, path: str):
        self.path = path
        self.reads: list[Read] = []
        self.aliases: dict[str, str] = {}
        self.guards: list[str] = []
        self.calls: dict[ast.AST, ast.Call] = {}

    def add(self, owner: str, name: str, node: ast.AST, call: ast.Call | None = None, default: bool = False) -> None:
        place = f"{self.path}:{getattr(node, 'lineno', 0)}"
        self.reads.append(Read(owner, name, place, tuple(self.guards), call, default))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.aliases = self.aliases, dict(self.aliases)
        names = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        self.aliases.update({name: name for name in names if name in OURS})
        self.guards.append(f"in {node.name}")
        self.block(node.body)
        self.guards.pop()
        self.aliases = outer

    def block(self, statements: list[ast.stmt]) -> None:
        """Visit statements in order. One that returns unless a condition holds guards those after it."""
        depth = len(self.guards)
        for statement in statements:
            self.visit(statement)
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], (ast.Return, ast.Raise)):
                test = statement.test
                if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                    self.guards.append(ast.unparse(test.operand))
        del self.guards[depth:]

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.under(node.test, lambda: self.block(node.body))
        self.block(node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        depth = len(self.guards)
        for value in node.values:
            self.visit(value)
            if isinstance(node.op, ast.And):
                self.guards.append(ast.unparse(value))
        del self.guards[depth:]

    def under(self, test: ast.expr, visit) -> None:
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        self.guards += map(ast.unparse, parts)
        visit()
        del self.guards[-len(parts) :]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        owner = owner_of(node.value, self.aliases)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.aliases.pop(target.id, None)
                if owner is not None:
                    self.aliases[target.id] = owner

    def visit_Call(self, node: ast.Call) -> None:
        if (owner := owner_of(node.func, self.aliases)) is not None:
            self.add(owner, "__call__", node, node)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = owner_of(node.args[0], self.aliases), node.args[1]
            if owner is not None and isinstance(name, ast.Constant):
                self.add(owner, name.value, node, default=node.func.id == "hasattr" or len(node.args) > 2)
        if isinstance(node.func, ast.Attribute):
            self.calls[node.func] = node
            if node.func.attr in NEVER_CALLED:
                self.add("", node.func.attr, node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = owner_of(node.value, self.aliases)
        # Attributes that vLLM only writes need not exist.
        if owner is not None and not isinstance(node.ctx, ast.Store):
            self.add(owner, node.attr, node, self.calls.get(node))
        self.generic_visit(node)


def reads_in(text: str, path: str) -> list[Read]:
    reader = Reader(path)
    reader.visit(ast.parse(text))
    return reader.reads


@cache
def reads() -> list[Read]:
    """All reads in vLLM's sources."""
    result = []
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        text = file.read_text()
        if path not in NOT_V2 and any(name in text for name in OURS):
            result += reads_in(text, path)
    return result


def ours(owner: str) -> dict[str, ast.AST]:
    """The members of our class: its own methods and attributes, and those of vLLM's ``BaseSpeculator``."""
    file, name = OURS[owner]
    (kind,) = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    members: dict[str, ast.AST] = {}
    if owner == "speculator":
        assert [ast.unparse(base) for base in kind.bases] == ["BaseSpeculator"]
        members = class_members(find(f"{GPU}/spec_decode/speculator.py", "BaseSpeculator"))
    return members | class_members(kind)


def class_members(kind: ast.ClassDef) -> dict[str, ast.AST]:
    members: dict[str, ast.AST] = {}
    for node in kind.body:
        if isinstance(node, ast.FunctionDef):
            members[node.name] = node
            if node.name == "__init__":
                members |= {
                    part.attr: part
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                }
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            members |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return members


def is_asked_of_ours(read: Read) -> bool:
    return not read.default and not any(guard in NEVER for guard in read.guards)


@pytest.mark.parametrize("owner", OURS)
def test_ours_has_what_upstream_reads(owner):
    has = ours(owner)
    missing = {read.name: read.place for read in reads() if read.owner == owner and is_asked_of_ours(read)}
    missing = {name: place for name, place in missing.items() if name not in has}
    assert not missing, f"vLLM reads these of {OURS[owner][1]}, which lacks them: {missing}"


@pytest.mark.parametrize("owner", OURS)
def test_ours_takes_what_upstream_passes(owner):
    has, bound = ours(owner), []
    for read in reads():
        if read.owner != owner or read.call is None or not is_asked_of_ours(read):
            continue
        method = has[read.name]
        assert isinstance(method, ast.FunctionDef), (
            f"{read.name} is no method of {OURS[owner][1]}, but {read.place} calls it"
        )
        assert not any(isinstance(argument, ast.Starred) for argument in read.call.args), read.place
        arguments = [None] * (1 + len(read.call.args))
        named = {keyword.arg: None for keyword in read.call.keywords}
        try:
            signature_of(method).bind(*arguments, **named)
        except TypeError as error:
            pytest.fail(f"{read.place} calls {OURS[owner][1]}.{read.name} with other arguments than it takes: {error}")
        bound.append(read.name)
    expected = {"rejection_sampler": {"__call__"}, "speculator": {"propose", "capture", "init_cudagraph_manager"}}
    assert set(bound) >= expected[owner]


def signature_of(method: ast.FunctionDef) -> inspect.Signature:
    stub = ast.parse(f"def {method.name}(): pass").body[0]
    assert isinstance(stub, ast.FunctionDef)
    stub.args = ast.parse(ast.unparse(method)).body[0].args  # type: ignore[attr-defined]
    for argument in [*stub.args.posonlyargs, *stub.args.args, *stub.args.kwonlyargs]:
        argument.annotation = None
    scope: dict = {}
    exec(ast.unparse(stub), {}, scope)
    return inspect.signature(scope[method.name])


def test_what_is_never_read_is_refused():
    """The conditions in ``NEVER`` occur in vLLM, and the stated reasons are true."""
    assert {guard for read in reads() for guard in read.guards} >= NEVER.keys()
    for name, guard in NEVER_CALLED.items():
        calls = [read for read in reads() if not read.owner and read.name == name]
        assert calls and all(guard in call.guards for call in calls)
    assert "args.watermark_config is not None" in (PLUGIN.parent / "support.py").read_text()
    assert "enable_adaptive_verification" not in ours("speculator")
    read = "getattr(self.speculator, 'enable_adaptive_verification', False)"
    assert read in ast.unparse(find(f"{GPU}/model_runner.py", "GPUModelRunner.initialize_kv_cache"))


READ = """
class Runner:
    def a(self):
        sampler = self.rejection_sampler
        return sampler.first, self.speculator.second()

    def b(self, speculator):
        if not isinstance(speculator, DraftModelSpeculator):
            return None
        return speculator.third

def c(runner):
    speculator = getattr(runner, "speculator", None)
    if speculator is not None and speculator.fourth:
        speculator.fifth = 1
    return getattr(speculator, "sixth", None), runner.rejection_sampler(1)
"""


def test_reads_are_found():
    """Reads are found by attribute, through another name, and of arguments. Guarded ones and defaults do not count."""
    all_reads = reads_in(READ, "x.py")
    required = {(read.owner, read.name) for read in all_reads if is_asked_of_ours(read)}
    assert required == {
        ("rejection_sampler", "first"),
        ("speculator", "second"),
        ("speculator", "fourth"),
        ("rejection_sampler", "__call__"),
    }
    assert {read.name for read in all_reads} == {"first", "second", "third", "fourth", "sixth", "__call__"}
