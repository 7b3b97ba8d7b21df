"""A rank killed in mid-generation ends the engine with a clear error and leaves nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from forking_server import ENVIRONMENT
from patience import SECONDS
from ray_cluster import ray_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("killed_run.py")
# How often each is tried; `scripts/check_kill` asks for many.
KILLS = int(os.environ.get("VLLM_GSD_KILLS", "1"))


@dataclass
class Program:
    """A running ``killed_run.py``, all its processes, and the shared memory they have."""

    process: subprocess.Popen
    ranks: list[int]
    processes: list[psutil.Process]
    segments: set[Path]


@contextlib.contextmanager
def generating(job: dict, folder: Path, environment: dict[str, str], command: tuple):
    """The program in mid-generation, run by ``command``; its errors go to ``folder / "errors"``."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the engine core in a process of its own, as it comes
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, PROGRAM, json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
    everything = [psutil.Process(process.pid)]
    try:
        main, *ranks = next(json.loads(line) for line in process.stdout if line.startswith("["))
        assert any(line == "generating\n" for line in process.stdout)
        pids = [main, *[child.pid for child in psutil.Process(main).children(recursive=True)], *ranks]
        everything += [psutil.Process(pid) for pid in dict.fromkeys(pids) if pid != process.pid]
        yield Program(process, ranks, everything, shared_memory(everything))
    finally:
        for one in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in ``/dev/shm`` that the processes have mapped, but for Ray's object store, which is the node's."""
    mapped = set()
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            mapped |= {Path(mapping.path) for mapping in one.memory_maps(grouped=False)}
    return {path for path in mapped if path.is_relative_to("/dev/shm") and "plasma" not in path.name}


def wait_until(gone, seconds: float):
    """What ``gone`` returns, once it is nothing or the time is over."""
    until = time.monotonic() + seconds
    while (left := gone()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def cluster():
    """One node; who needs a second one adds it."""
    with ray_cluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture
def job(tiny_pair):
    config = {"method": "gsd", "model": str(tiny_pair.draft), "budget": 16}
    return {"target": str(tiny_pair.target), "config": config, "engine": {"tensor_parallel_size": 2}}


def test_plugin_missing_on_a_node(job, cluster, preforked, tmp_path):
    """The second node cannot import the plugin: it is named. (The first test here, as it needs the second node.)"""
    # Ray's workers look for modules where the driver does; only this keeps them from finding it on one machine.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['vllm_gsd'] = None\n")
    job["engine"]["distributed_executor_backend"] = "ray"
    node = cluster.add_node(PYTHONPATH=str(tmp_path))
    try:
        done = subprocess.run(
            [preforked, PROGRAM, json.dumps(job)],
            env={**os.environ, **ENVIRONMENT, **cluster.joining},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    finally:
        cluster.remove_node(node)
    assert done.returncode == 1
    sentences = [line for line in done.stderr.splitlines() if "vllm-gsd" in line and "GSDConfigError" in line]
    assert sentences, done.stderr
    assert "The Ray node " in sentences[-1] and "cannot import vllm-gsd" in sentences[-1]
    assert "install vllm-gsd" in sentences[-1]


@pytest.mark.parametrize("attempt", range(KILLS))
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_killed_rank(job, backend, attempt, preforked, tmp_path, request):
    environment = {}
    if backend == "ray":
        cluster = request.getfixturevalue("cluster")
        environment = cluster.environment()
        if len(cluster.nodes) == 1:
            cluster.add_node()
    job["engine"]["distributed_executor_backend"] = backend
    # In one attempt of each, a first and a second rank.
    check_killed(job, (attempt + (backend == "ray")) % 2, tmp_path, environment, command=(preforked,))


def check_killed(job: dict, victim: int, folder: Path, environment: dict[str, str], command: tuple) -> None:
    """Kill a rank of the program, run by ``command``: it must end by itself and leave nothing behind."""
    with generating(job, folder, environment, command) as program:
        assert program.segments
        os.kill(program.ranks[victim], signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what it said so far tells more
            program.process.wait(SECONDS)
        code, errors = program.process.poll(), (folder / "errors").read_text()
        assert code == 1 and "EngineDeadError" in errors, errors
        assert not wait_until(lambda: [one for one in program.processes if alive(one)], SECONDS)
        assert not wait_until(lambda: {path for path in program.segments if path.exists()}, SECONDS)


def alive(process: psutil.Process) -> bool:
    """Whether it runs; Ray reaps its actors when it pleases."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
