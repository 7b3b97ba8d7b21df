"""Runs ``vllm serve`` in its own process."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from forking_server import ENVIRONMENT
from patience import SECONDS

VLLM = Path(sys.executable).parent / "vllm"
FORKING = Path(__file__).with_name("forking.py")
# Above the ports of Ray's workers, and below those that Linux gives to sockets without a port of their own.
PORTS = 20000, 29000


@dataclass
class Server:
    """A running ``vllm serve``."""

    process: subprocess.Popen
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=SECONDS) as answer:
            return answer.read().decode()

    def counter(self, name: str) -> float:
        """A counter of ``/metrics``, summed over its labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"{name}_total{{")]
        assert lines, f"no {name} in /metrics"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait(self) -> None:
        """Wait until the server answers."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-5000:]}")


def free_port() -> int:
    """A port for a server. None of those that the system gives out: another process could get it before the server."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def server_environment() -> dict[str, str]:
    """Environment variables of a server's process."""
    # By default, vLLM binds a worker to a core, and all servers on the machine would share that core.
    environment = {**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return environment


@contextlib.contextmanager
def serving(model: Path, folder: Path, *flags: str, command=(sys.executable, FORKING, VLLM), **options):
    """Start a server of ``model``, served as "target", and kill it at the end. It may not answer yet; see ``wait``.

    Args:
        folder: folder for its log.
        flags: more arguments for ``vllm serve`` without a value, as ``--flag``.
        options: more arguments for ``vllm serve`` with a value, such as ``some_option="value"``.
        command: replaces the ``vllm`` command.
    """
    port = free_port()
    options = {
        "served_model_name": "target",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 29,
        "generation_config": "vllm",
        **options,
    }
    words = [str(word) for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "serve", model, "--enforce-eager", *flags, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=server_environment(),
            start_new_session=True,
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", folder / "log")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
