"""MkDocs hooks: pages for files outside ``docs/``, so that the same links work on the site and in a checkout.

A link to a source file opens a page with the file. CONTRIBUTING.md and CHANGELOG.md are pages of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
BORROWED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
# [text](target#anchor), or the definition of a reference: [name]: target
LINK = re.compile(
    r"\]\((?P<inline>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)|^(?P<name>\[[^\]]+\]:) (?P<defined>[^\s:]+)$", re.M
)
LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".h": "cpp",
    ".json": "json",
    ".yaml": "yaml",
    ".toml": "toml",
    ".sh": "bash",
}


def on_files(files, config):
    """Add the pages from outside ``docs/``, and one for every linked source file."""
    for page, origin in BORROWED.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    linked = set()
    for file in files.documentation_pages():
        linked |= {path for match in LINK.finditer(file.content_string) if (path := _source(match, file.src_uri))}
    for path in sorted(linked):
        language = LANGUAGES.get(Path(path).suffix, "text")
        code = (
            f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n~~~~~~ {language}\n{(ROOT / path).read_text()}\n~~~~~~\n"
        )
        files.append(File.generated(config, _page(path), content=code))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a checkout for the site."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return LINK.sub(lambda match: _site_link(match, page.file.src_uri), markdown)


def _site_link(match, page: str) -> str:
    path = _repository_path(match, page)
    if source := _source(match, page):
        target = _page(source)
    elif path in BORROWED.values():
        target = next(name for name, origin in BORROWED.items() if origin == path)
    else:
        target = path.removeprefix("docs/")
    link = posixpath.relpath(target, posixpath.dirname(page) or ".") + (match["anchor"] or "")
    return f"{match['name']} {link}" if match["name"] else f"]({link})"


def _source(match, page: str) -> str | None:
    path = _repository_path(match, page)
    outside = not path.startswith("docs/") and path not in BORROWED.values()
    return path if outside and (ROOT / path).is_file() else None


def _repository_path(match, page: str) -> str:
    base = BORROWED.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), match["inline"] or match["defined"]))


def _page(path: str) -> str:
    return f"source/{path}.md"
