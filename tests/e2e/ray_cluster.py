"""A Ray cluster of several nodes on this machine, started with ``ray start``: CPUs only, no dashboard."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from patience import SECONDS
from serve_process import free_port

RAY = Path(sys.executable).parent / "ray"
PLUGINS = Path(__file__).with_name("plugins")
# Without this, `ray start` would write an authentication token, which a test's own processes do not need.
CLIENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
NODE = {
    **CLIENT,
    "RAY_worker_niceness": "0",  # by default, workers run at low priority and starve on a busy machine
    "RAY_memory_monitor_refresh_ms": "0",  # do not kill workers because other programs use memory
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    # No workers before they are needed: their environment would not be the program's.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


@dataclass
class RayCluster:
    """A running cluster."""

    address: str
    folder: Path
    nodes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def joining(self) -> dict[str, str]:
        """Environment of a program that joins the cluster; its ranks use the environment of their nodes."""
        return {**CLIENT, "RAY_ADDRESS": self.address}

    def environment(self, **ranks: str) -> dict[str, str]:
        """Environment of a program that joins the cluster, with ranks that sleep until a message arrives.

        Args:
            ranks: environment variables for the ranks only. If they were set for the nodes, each of Ray's many
                processes would read them.
        """
        path = [ranks.get("PYTHONPATH") or os.environ.get("PYTHONPATH"), PLUGINS]
        ranks["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in path if folder)
        job = json.dumps({"runtime_env": {"env_vars": ranks}})
        return {**self.joining, "RAY_JOB_CONFIG_JSON_ENV_VAR": job}

    def add_node(self, num_cpus: int = 1, **environment: str) -> subprocess.Popen:
        """Start a node and wait until it has joined. The first node is the head.

        Args:
            environment: environment variables for all of the node's processes, including ranks.
        """
        head = ["--head", f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self.folder}"]
        # Logs of all nodes are in one folder, so one process reads them.
        other = [f"--address={self.address}", "--include-log-monitor=false"]
        address = other if self.nodes else [*head, "--include-dashboard=false", "--no-monitor"]
        command = [RAY, "start", *address, f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--block"]
        log = self.folder.with_name(f"{self.folder.name}-node-{len(self.nodes)}.log")
        until = time.monotonic() + SECONDS
        while True:
            with log.open("wb") as stream:
                node = subprocess.Popen(
                    command,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **NODE, **environment},
                    start_new_session=True,
                )
            self.nodes.append(node)
            while "Ray runtime started" not in log.read_text():
                if node.poll() is not None or time.monotonic() > until:
                    break
                time.sleep(0.2)
            else:
                return node
            self.remove_node(node)
            # Ray's limit of thirty seconds for a node to start cannot be changed, and is too short on a busy machine.
            assert "timed out during startup" in log.read_text() and time.monotonic() < until, log.read_text()

    def remove_node(self, node: subprocess.Popen) -> None:
        """Stop a node and all its processes."""
        self.nodes.remove(node)
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)

    def close(self) -> None:
        for node in reversed(self.nodes.copy()):
            self.remove_node(node)
        shutil.rmtree(self.folder, ignore_errors=True)
        for log in self.folder.parent.glob(f"{self.folder.name}-node-*.log"):
            log.unlink()


@contextlib.contextmanager
def ray_cluster(nodes: int, **environment: str):
    """A cluster of nodes with one CPU each, so that every rank runs on its own node.

    Args:
        environment: as for ``RayCluster.add_node``.
    """
    # Ray puts sockets here. Their paths are limited to about a hundred characters, and pytest's folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    cluster = RayCluster(f"127.0.0.1:{free_port()}", folder)
    try:
        for _ in range(nodes):
            cluster.add_node(**environment)
        yield cluster
    finally:
        cluster.close()
