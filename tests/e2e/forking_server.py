"""A server from which programs that import vLLM are forked; see ``preforked``."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from engine_process import ENVIRONMENT


@contextlib.contextmanager
def forking_server(folder: Path, *module: str, **environment: str):
    """A command that behaves like ``python`` and starts programs that import vLLM by forking (see ``preforked.py``).

    Args:
        module: one that the server imports first, if any.
        environment: more environment variables of the server, which programs do not get.
    """
    program, address, command = Path(__file__).with_name("preforked.py"), folder / "socket", folder / "python"
    ask = f'exec "{sys.executable}" -SE "{program}" "{address}" "$@"'
    command.write_text(f"""#!/bin/sh
PREFORKED="$0"
export PREFORKED
case "$1 $2" in "-m vllm_gsd."*) {ask} ;; "-"*) exec "{sys.executable}" "$@" ;; *) {ask} ;; esac
""")
    command.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, program, "--serve", address, *module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Even engines in eager mode compile a few small functions, which takes each of them seconds.
        env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", "TORCHDYNAMO_DISABLE": "1", **environment},
    )
    assert b"listening\n" in server.stdout
    yield str(command)
    server.stdin.close()
    server.wait()
