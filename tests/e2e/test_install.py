"""Built and installed by the documented commands into an environment with vLLM, the package serves with its kernels."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest
from patience import SECONDS
from serve_process import FORKING, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
# What a clone does not have.
UNTRACKED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.so", "build", "out", "shared"
)
LOOK = """
import vllm_gsd, vllm_gsd._core
from vllm_gsd.ops import HAVE_EXTENSION
assert HAVE_EXTENSION
print(vllm_gsd.__file__)
"""


def make_environment(folder: Path, others: Path, *options: str) -> Path:
    """A Python with all packages of this one but ours and what builds packages; pip installs beside them."""
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    others.mkdir()
    ours = ("vllm_gsd", "pip", "setuptools", "_distutils_hack", "distutils-precedence", "pybind11", "ninja", "wheel")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.lstrip("_").removeprefix("editable_").lstrip("_").startswith(ours):
            (others / package.name).symlink_to(package)
    # Not linked into the environment itself: pip would remove files behind the links, were it to replace a package.
    next(folder.glob("lib/python*/site-packages")).joinpath("others.pth").write_text(str(others))
    return folder / "bin/python"


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """The sources as in a clone, where nothing has been built, and no variables that say otherwise."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("VLLM_GSD_NO_EXTENSION", raising=False)
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(ROOT, tmp_path / "vllm_gsd", symlinks=True, ignore=UNTRACKED)


def run(*command, **environment: str) -> None:
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
    environment = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-5000:]


def test_a_failed_build_is_told(clone, tmp_path):
    """One sentence that says what to do, and no stamp that would pass the failure off as done.

    The environment lacks pip, as one whose making was interrupted does.
    """
    make_environment(clone / ".venv", tmp_path / "others", "--without-pip")
    environment = {**os.environ, "CXX": "/bin/false"}
    done = subprocess.run([clone / "scripts/setup"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and not done.stdout
    begun, told = done.stderr.splitlines()
    assert begun.startswith("setup: installing vLLM")
    assert told.startswith("setup: the kernels could not be built (") and "VLLM_GSD_NO_EXTENSION=1" in told
    assert told.endswith(" All output is in .venv/install.log.")
    assert not list((clone / ".venv").glob(".stamp-*"))


def test_a_moved_environment_is_made_anew(clone, tmp_path):
    """Its programs, such as pip, would look for their Python in the old folder."""
    subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)
    (clone / ".venv/.stamp-requirements").touch()
    (clone / "scripts/install").write_text("raise SystemExit(1)")
    moved = clone.rename(tmp_path / "moved")
    assert subprocess.run([moved / "scripts/setup"], capture_output=True).returncode != 0
    run(moved / ".venv/bin/pip", "--version")


def test_an_environment_of_another_version_than_the_named_is_made_anew(clone):
    named = clone / ".venv/bin/python"
    named.parent.mkdir(parents=True)
    named.write_text("#!/bin/sh\necho '(3, 9)'\n")
    named.chmod(0o755)
    (clone / "scripts/install").write_text("raise SystemExit(1)")
    environment = {**os.environ, "PYTHON": sys.executable}
    assert subprocess.run(["scripts/setup"], cwd=clone, env=environment).returncode != 0
    run(named, "-m", "pip", "--version")
    (clone / ".venv/kept").touch()
    assert subprocess.run(["scripts/setup"], cwd=clone, env=environment).returncode != 0
    assert (clone / ".venv/kept").exists()  # it is of the named version now


def test_installs_and_serves(clone, tmp_path, tiny_pair):
    """A source distribution, a wheel built from it, installed, with no checkout left; a server of it."""
    python = make_environment(tmp_path / "environment", tmp_path / "others")
    run(python, "-m", "pip", "install", "build", "setuptools>=77", "pybind11>=3", "ninja")
    compiler = tmp_path / "c++"
    # Whether it builds and serves is the question. scripts/setup has built the same sources with optimisation.
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    run(python, "-m", "build", "--no-isolation", clone, "--outdir", tmp_path / "dist", CXX=str(compiler))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 1
    run(python, clone / "scripts/install", "--cpu", "--wheel", wheel)
    shutil.rmtree(clone)

    found = subprocess.run([python, "-c", LOOK], check=True, capture_output=True, text=True, timeout=SECONDS).stdout
    assert Path(found.strip()).is_relative_to(python.parents[1])

    config = {"method": "gsd", "model": str(tiny_pair.draft), "budget": 16}
    (tmp_path / "gsd.json").write_text(json.dumps(config))
    command = [python, FORKING, "-m", "vllm.entrypoints.cli.main"]  # the last is what the command `vllm` starts
    options = {"speculative_config": tmp_path / "gsd.json"}
    with serving(tiny_pair.target, tmp_path, command=command, **options) as server:
        server.wait()
        asked = {
            "model": "target",
            "prompt": "w5 w6 w7 w5 w6 w7 w5",
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 16
        assert server.counter("vllm:spec_decode_num_drafts") > 0
