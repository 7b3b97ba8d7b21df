"""Runs Python programs by forking a process that has already imported vLLM; the import takes ten seconds of CPU time.

``preforked.py --serve SOCKET OWNER [MODULE]`` is the server, which imports the module first and ends when the process
OWNER does. ``preforked.py SOCKET PROGRAM [ARGUMENTS]`` asks it to run a program (a file or ``-m MODULE``) with the
client's standard streams, environment and working directory. The client exits with the program's exit code, so its
caller can treat it as the program itself. Environment variables that vLLM reads during its import have no effect.
"""

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys

import forking  # beside this file


def ask(path: str, arguments: list[str]) -> int:
    """Ask the server to run a program, forward signals to it, and return its exit code."""
    job = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"-"], [0, 1, 2])
        server.sendall(json.dumps(job).encode() + b"\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        return int(server.makefile().read() or 1)


def serve(path: str, owner: int) -> None:
    """Import vLLM, then run programs until the owner ends."""
    forking.import_vllm()
    owner_fd = os.pidfd_open(owner)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the forked keepers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listening", flush=True)
        while owner_fd not in select.select([listener, owner_fd], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os._exit(keep(client))
            client.close()
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def keep(client: socket.socket) -> int:
    """Run one program for a client, and kill the program if the client exits first."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked, files, *_ = socket.recv_fds(client, 1, 3)
    if not asked:  # it only looked whether the server listens
        return 0
    with client.makefile() as lines:
        job = json.loads(lines.readline())
    program = os.fork()
    if program == 0:
        client.close()
        run(job, files)
    for file in files:
        os.close(file)
    program_fd = os.pidfd_open(program)
    while program_fd not in select.select([client, program_fd], [], [])[0]:
        signal_number = client.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal_number[0] if signal_number else signal.SIGKILL)
        if not signal_number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(str(code if code >= 0 else 128 - code).encode())
    return 0


def run(job: dict, files: list[int]) -> None:
    """Become the program: take the client's streams and environment, run it, and exit."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.executable = os.environ.get("PREFORKED", sys.executable)  # for programs that run ``sys.executable -m``
    import torch._dynamo

    # Even an engine in eager mode compiles a few small functions, which takes it seconds.
    torch._dynamo.config.disable = True
    sys.exit(forking.run(job["arguments"]))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        for module in sys.argv[4:]:
            importlib.import_module(module)
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
