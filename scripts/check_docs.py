"""Checks the documentation without building it: links, named paths and tests, generated regions."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import docs_pages  # noqa: E402

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
# A path in backticks. "*" matches any name, and "::" begins the name of a test.
PATH = re.compile(
    r"`(?:\.venv/bin/python |python |\./)?"
    r"((?:vllm_gsd|tests|scripts|kernels|docs|examples)/[\w./*-]*)(::[\w.:]+)?[^`\n]*`"
)
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.DOTALL | re.MULTILINE)


def main() -> None:
    pages = [ROOT / name for name in TOP] + sorted((ROOT / "docs").rglob("*.md"))
    problems = [problem for page in pages for problem in check_page(page)]
    problems += [f"docs/support.toml: no test {test}" for test in docs_pages.tests_named() if not _test_exists(test)]
    problems += [problem for file in sorted((ROOT / "vllm_gsd").rglob("*.py")) for problem in check_code(file)]
    problems += [f"docs/{page}: out of date, run scripts/docs_pages.py" for page in docs_pages.outdated()]
    if problems:
        sys.exit("\n".join(problems))


def check_page(page: Path) -> list[str]:
    """Problems with the links and paths of a page."""
    text = FENCE.sub("", page.read_text())
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
    links = [inline or defined for inline, defined in LINK.findall(text)]
    problems = [f"{name}: broken link {link}" for link in links if not _link_works(page, link)]
    if page.parent.name == "experiments":  # experiments name files by their names at the time
        return problems
    for path, test in PATH.findall(text):
        if not _exists(path) or (test and not _test_exists(path + test)):
            problems.append(f"{name}: no {path}{test}")
    return problems


def check_code(file: Path) -> list[str]:
    """Pages that comments, docstrings and messages name, but that do not exist."""
    named = set(re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text()))
    return [f"{file.relative_to(ROOT)}: no {page}" for page in sorted(named) if not (ROOT / page).exists()]


def _link_works(page: Path, link: str) -> bool:
    if re.match(r"\w+:", link):
        return True
    target, _, anchor = link.partition("#")
    path = (page.parent / target) if target else page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in _anchors(path.read_text())


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def _exists(path: str) -> bool:
    path = path.rstrip("./")
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def _test_exists(name: str) -> bool:
    path, _, test = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    if not test:
        return True
    wanted = test.split("::")[-1]
    tree = ast.parse((ROOT / path).read_text())
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == wanted for node in ast.walk(tree)
    )


if __name__ == "__main__":
    main()
