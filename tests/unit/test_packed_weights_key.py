"""vLLM's cache never returns code that was compiled for another layout of packed weights, or for another draft."""

import pytest
import torch
from vllm.config import VllmConfig

from vllm_gsd.cpu import linear as ops_linear
from vllm_gsd.cpu import packed_weights
from vllm_gsd.cpu.linear import pack_weight
from vllm_gsd.cpu.packed_weights import PacksWeights
from vllm_gsd.upstream.wire import note_compiled

WEIGHT = torch.arange(64 * 2).view(64, 2).to(torch.bfloat16)  # four panels


@pytest.fixture
def load(monkeypatch, isa_and_threads):
    """Loads a model with one weight; returns the width of its groups, our key in the config, and vLLM's cache name."""
    monkeypatch.setattr(packed_weights, "packs_weights", lambda weight: True)

    class Base:
        def load_model(self):
            self.packed = pack_weight(WEIGHT)

    class Worker(PacksWeights, Base):
        pass

    def run(isa: int, threads: int, kernels: str = "auto"):
        isa_and_threads(isa, threads)
        worker = Worker()
        worker.vllm_config = VllmConfig(
            additional_config={"gsd": {"method": "gsd", "model": None, "cpu_kernels": kernels}}
        )
        # No head is tied, and the model itself does not matter.
        monkeypatch.setattr(packed_weights.weights, "pack_lm_heads", lambda embeddings: None)
        monkeypatch.setattr(worker.vllm_config, "model_config", type("Model", (), {"head_dtype": 0, "dtype": 0}))
        worker.load_model()
        key = worker.vllm_config.additional_config["gsd_packed_weights"]
        name = VllmConfig(additional_config=worker.vllm_config.additional_config).compute_hash()
        return worker.packed.shape[2], key, name

    return run


@pytest.fixture
def isa_and_threads(monkeypatch):
    """Simulates another instruction set and number of threads; PyTorch computes the layout."""

    def pretend(isa: int, threads: int) -> None:
        monkeypatch.setattr(ops_linear, "_isa", lambda: isa)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    return pretend


@pytest.mark.parametrize(
    ("one", "other"),
    [((3, 1), (3, 4)), ((3, 1), (2, 1)), ((2, 1), (1, 1))],
    ids=["threads", "bf16 and avx512", "avx512 and avx2"],
)
def test_two_widths_have_two_keys(load, one, other):
    widths, keys, names = zip(load(*one), load(*other), strict=True)
    assert widths[0] != widths[1]
    assert keys[0] != keys[1] and names[0] != names[1]
    assert load(*one)[1:] == (keys[0], names[0])


def test_the_layers_that_the_draft_reads_are_in_the_key():
    names = set()
    for layers in (False, None, [2, 4, 5], [1, 4, 5]):
        config = VllmConfig(additional_config={"gsd": {}})
        note_compiled(config, read_layers=layers)
        names.add(config.compute_hash())
    assert len(names) == 4


def test_nothing_packed(load, monkeypatch):
    packed = load(3, 1)
    monkeypatch.setattr(packed_weights, "packs_weights", lambda weight: False)
    assert load(3, 1)[1] is None and load(3, 1)[2] != packed[2]


def test_kernels_off(load):
    packed = load(3, 1)
    assert load(3, 1, "off")[1] is None and load(3, 1, "off")[2] != packed[2]
