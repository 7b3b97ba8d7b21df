"""Servers from which programs that import vLLM are forked; see ``preforked``."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PREFORKED = Path(__file__).with_name("preforked.py")
# One OpenMP thread per process: on a shared machine, two busy threads mostly wait for each other.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


class ForkingServer:
    """A server that starts when it is first needed. The processes of a test run share it, and it ends with the run.

    Args:
        name: tells it from other servers.
        module: one that it imports first, if any.
        environment: more environment variables of the server, which programs do not get.
    """

    def __init__(self, name: str, *module: str, **environment: str):
        self.name, self.module, self.environment = name, module, environment

    def command(self, *through: Path) -> str:
        """A command that behaves like ``python`` and starts programs that import vLLM by forking.

        Args:
            through: a program that runs the program that it is given.
        """
        # pytest-xdist's processes are children of the one that a user started.
        owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
        folder = Path(tempfile.gettempdir()) / f"vllm-gsd-tests-{owner}-{self.name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        address = folder / "socket"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not listens(address):
                self._start(address, owner)
            command = folder / "-".join(["python", *(program.stem for program in through)])
            if not command.exists():  # a program that runs may not be written to
                program = " ".join(f'"{word}"' for word in (sys.executable, "-SE", PREFORKED, address, *through))
                command.write_text(f"""#!/bin/sh
PREFORKED="$0"
export PREFORKED
case "$1 $2" in "-m vllm_gsd."*) ;; "-"*) exec "{sys.executable}" "$@" ;; esac
exec {program} "$@"
""")
                command.chmod(0o700)
        return str(command)

    def _start(self, address: Path, owner: int) -> None:
        for stale in address.parent.glob("[!l]*"):  # of a server that was killed; the lock stays
            stale.unlink()
        server = subprocess.Popen(
            [sys.executable, PREFORKED, "--serve", address, str(owner), *self.module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", **self.environment},
            start_new_session=True,
        )
        assert b"listening\n" in server.stdout
        server.returncode = 0  # nothing waits for it


def listens(address: Path) -> bool:
    """Whether a server accepts programs at this address."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(address)) == 0
