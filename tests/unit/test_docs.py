"""The documentation check finds mistakes in pages. ``scripts/lint`` runs it on the real pages."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from vllm_gsd.config import GSDConfig, allowed

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docs_pages():
    return load("docs_pages")


@pytest.fixture(scope="module")
def check_docs(docs_pages):
    return load("check_docs")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("See [there](nowhere.md).", "broken link nowhere.md"),
        ("See [there][x].\n\n[x]: ../nowhere.py\n", "broken link ../nowhere.py"),
        ("# Here\n\n[there](#no-such-heading)", "broken link #no-such-heading"),
        ("In `vllm_gsd/nowhere.py`.", "no vllm_gsd/nowhere.py"),
        ("Run `.venv/bin/python scripts/nothing --all`.", "no scripts/nothing"),
        ("By `tests/unit/test_docs.py::test_nothing`.", "no tests/unit/test_docs.py::test_nothing"),
    ],
)
def test_what_is_wrong_is_found(check_docs, tmp_path, text, problem):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert check_docs.check_page(page) == [f"page.md: {problem}"]


def test_what_is_right_is_not(check_docs, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page, named\n\n[there](#a-page-named), [out](https://example.org), `vllm_gsd/*/__init__.py`,\n"
        "`./scripts/test`,\n"
        "`tests/unit/test_docs.py::test_what_is_right_is_not`\n\n```\n[code](nowhere.md)\n```\n"
    )
    assert check_docs.check_page(page) == []


def test_code_names_pages_that_exist(check_docs, tmp_path, monkeypatch):
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/there.md").touch()
    file = tmp_path / "code.py"
    file.write_text('# See docs/there.md.\nERROR = "docs/gone.md says why"\n')
    assert check_docs.check_code(file) == ["code.py: no docs/gone.md"]


def test_a_matrix_that_contradicts_the_refusals(docs_pages):
    feature = {"name": "LoRA", "cells": {"v1-cpu": "works", "v2-cpu": "works", "v2-gpu": "works"}, "tests": []}
    with pytest.raises(docs_pages.DocsError, match="LoRA: v2-gpu is works"):
        docs_pages._row(feature, {("V2", "GPU")})
    del feature["cells"]["v2-gpu"]
    assert docs_pages._row(feature, {("V2", "GPU")}) == ["LoRA", "works", "works", "refused", ""]
    with pytest.raises(docs_pages.DocsError, match="v2-gpu is None"):
        docs_pages._row(feature, set())


def test_every_key_is_described():
    for name, field in GSDConfig.model_fields.items():
        assert field.description and field.description.endswith(".")
        assert allowed(name)


def test_counters_that_pages_give_to_prometheus_end_in_total():
    """Prometheus appends ``_total`` to their names, so expressions without it return nothing."""
    for name in ("reference/metrics.md", "quickstart.md"):
        page = (SCRIPTS.parent / "docs" / name).read_text()
        assert "vllm:gsd_target_steps_total" in page and "vllm:generation_tokens_total" in page
        assert all(counter.endswith("_total") for counter in re.findall(r"rate\((vllm:\w+)", page))
