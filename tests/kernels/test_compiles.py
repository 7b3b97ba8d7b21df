"""The Triton kernels compiled for GPUs that are not there, in all specialisations that engines ask for."""

import json

import pytest
from test_triton import FOLDER, pytestmark, run  # noqa: F401

ARCHITECTURES = (80, 90, 100)
KERNELS = {
    "tree_attention_kernel", "merge_kernel", "kv_move_kernel", "accept_walk_kernel", "lay_out_kernel", "begin_kernel",
    "grow_kernel", "lattice_kernel", "match_kernel", "graft_kernel", "graft_tree_kernel", "flatten_kernel",
    "best_of_parts_kernel", "best_of_rows_kernel", "best_paths_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    done = run(
        str(FOLDER / "compile_kernels.py"), *map(str, ARCHITECTURES), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("c"))
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_to_machine_code_without_spills_and_races(report):
    for capability in ARCHITECTURES:
        found = [entry for entry in report["compiled"] if entry["capability"] == capability]
        assert {entry["kernel"] for entry in found} == KERNELS
        for entry in found:
            assert entry["cubin"] > 0 and entry["shared"] <= 99 * 1024 and entry["spilled"] == 0, entry
            assert not entry["races"], entry
        for kernel in ("tree_attention_kernel", "merge_kernel", "kv_move_kernel"):
            wide = [entry["wide_loads"] for entry in found if entry["kernel"] == kernel and entry["case"] == "default"]
            assert all(wide), f"{kernel} does not load 16 bytes at a time: {found}"


def test_their_number_is_bounded(report):
    """Batches of 1 to 1024 requests and contexts to 128k ask for nothing that the first step did not compile."""
    for name, later in report["later"].items():
        assert not any(later.values()), f"{name}: {later}"
    default = [entry for entry in report["compiled"] if (entry["case"], entry["capability"]) == ("default", 90)]
    assert len(default) <= 25, [entry["kernel"] for entry in default]
