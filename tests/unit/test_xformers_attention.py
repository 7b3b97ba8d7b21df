"""Tree attention through xformers, with PyTorch instead of its kernels.

The tests run once with a fake package and once with the real one, whose own masks and checks verify our calls.
"""

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from references.paged import paged_tree_attention_reference

from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.attention.xformers import load_xformers, xformers_tree_attention

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 64


class PagedMask(SimpleNamespace):
    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        return cls(q_seqlen=q_seqlen, kv_seqlen=kv_seqlen, block_tables=block_tables, page_size=page_size)


def dense(query, key, value, bias, scale):
    """Attention of [M, G, H, K] over [N, G, H, K] with bias [G, H, M, N]: output and log-sum-exp [G, H, M]."""
    scores = torch.einsum("mghk,nghk->ghmn", query.double(), key.double()) * scale + bias
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("ghmn,nghk->mghk", torch.exp(scores - lse.unsqueeze(-1)), value.double()), lse


def partial(query, key, value, attn_bias, scale, op):
    """xformers' partial attention: [B, M, G, H, K] and [B, G, H, M]. With a paged mask, B = 1 row has all requests."""
    assert op == "split-K"
    if isinstance(attn_bias, torch.Tensor):
        assert attn_bias.shape == (len(query), KV_HEADS, HEADS // KV_HEADS, query.shape[1], key.shape[1])
        parts = [dense(*each, scale) for each in zip(query, key, value, attn_bias, strict=True)]
        return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    outputs, lses = [], []
    starts = [0, *itertools.accumulate(attn_bias.q_seqlen)]
    for request, (first, end) in enumerate(itertools.pairwise(starts)):
        index = torch.arange(attn_bias.kv_seqlen[request])
        page = attn_bias.block_tables[request, index // attn_bias.page_size].long()
        slot = page * attn_bias.page_size + index % attn_bias.page_size
        out, lse = dense(query[0, first:end], key[0, slot], value[0, slot], torch.zeros(()), scale)
        outputs.append(out)
        lses.append(lse)
    return torch.cat(outputs).unsqueeze(0), torch.cat(lses, -1).unsqueeze(0)


def merge(attn_split, lse_split, write_lse, output_dtype):
    weights = torch.softmax(torch.stack(list(lse_split)), 0).permute(0, 1, 4, 2, 3).unsqueeze(-1)
    return (weights * torch.stack(list(attn_split))).sum(0).to(output_dtype), None


@pytest.fixture
def xformers(monkeypatch):
    fmha = ModuleType("xformers.ops.fmha")
    fmha.attn_bias = SimpleNamespace(PagedBlockDiagonalPaddedKeysMask=PagedMask)
    fmha.triton_splitk = SimpleNamespace(FwOp="split-K")
    fmha.memory_efficient_attention_partial, fmha.merge_attentions = partial, merge
    ops = ModuleType("xformers.ops")
    ops.fmha = fmha
    for name, module in (("xformers", ModuleType("xformers")), ("xformers.ops", ops), ("xformers.ops.fmha", fmha)):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def real_xformers(monkeypatch):
    """Loads the real package with PyTorch instead of the two functions that start kernels."""
    folder = Path(sys.prefix) / "triton"  # scripts/setup puts xformers and Triton here, where vLLM does not find them
    if importlib.util.find_spec("xformers") is None:
        if not (folder / "xformers").is_dir():
            pytest.skip("xformers is not installed; scripts/setup installs it")
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
        monkeypatch.setitem(sys.modules, "triton", None)
    fmha = load_xformers()
    monkeypatch.setattr(fmha, "memory_efficient_attention_partial", RealPartial(fmha))
    monkeypatch.setattr(fmha, "merge_attentions", RealMerge(fmha))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        del sys.modules[name]


class RealPartial:
    """Checks that the real function would accept the call, and computes attention with the mask's bias."""

    def __init__(self, fmha):
        self.fmha, self.signature = fmha, inspect.signature(fmha.memory_efficient_attention_partial)

    def __call__(self, *args, **kwargs):
        arguments = self.signature.bind(*args, **kwargs).arguments
        query, key, value, bias, op = (arguments[name] for name in ("query", "key", "value", "attn_bias", "op"))
        assert op is self.fmha.triton_splitk.FwOp
        inputs = self.fmha.Inputs(query=query, key=key, value=value, attn_bias=bias, scale=arguments["scale"])
        inputs.validate_inputs()
        reasons = op.not_supported_reasons(inputs)
        assert all("device" in reason or "triton" in reason for reason in reasons), reasons
        if not isinstance(bias, torch.Tensor):
            padded = len(bias.block_tables) * bias.block_tables.shape[1] * bias.page_size
            mask = bias.materialize((query.shape[1], padded), torch.float64)
            bias = torch.full((query.shape[1], key.shape[1]), -torch.inf, dtype=torch.float64)
            bias[:, : mask.shape[1]] = mask
            bias = bias.expand(1, 1, 1, -1, -1)
        parts = [dense(*each, arguments["scale"]) for each in zip(query, key, value, bias, strict=True)]
        return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


class RealMerge:
    """Checks that the real function would accept the call, and merges in PyTorch."""

    def __init__(self, fmha):
        self.signature = inspect.signature(fmha.merge_attentions)

    def __call__(self, *args, **kwargs):
        return merge(**self.signature.bind(*args, **kwargs).arguments)


def inputs(dtype=torch.float16, physical="nhd", block_size=BLOCK_SIZE):
    """Graphs of 3, 0 and 2 rows, with a padding row; bits of the masks extend beyond the block tables."""
    random = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(12, block_size, KV_HEADS, 2 * HEAD_SIZE, generator=random).to(dtype)
    if physical == "hnd":
        kv_cache = kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    key, value = kv_cache.split(HEAD_SIZE, -1)
    return (
        torch.randn(6, HEADS, HEAD_SIZE, generator=random).to(dtype), key, value,
        AttendingRows(
            torch.tensor([0, 3, 3, 5], dtype=torch.int32), torch.tensor([250, 4, 70], dtype=torch.int32),
            torch.tensor([[3, 1, 5, 7], [0, 0, 0, 0], [6, 2, 0, 0]], dtype=torch.int32),
            torch.tensor([250, 251, 251, 70, 71, 0]), torch.tensor([[1], [3], [5], [1], [3], [0]]),
        ),
        0.2,
    )  # fmt: skip


@pytest.mark.parametrize("package", ["xformers", "real_xformers"])
def test_equals_the_reference(package, request):
    request.getfixturevalue(package)
    arguments = inputs()
    output, exact = torch.full_like(arguments[0], 7.0), torch.full(arguments[0].shape, 7.0, dtype=torch.float64)
    xformers_tree_attention(output, *arguments)
    paged_tree_attention_reference(exact, *arguments)
    torch.testing.assert_close(output.double(), exact, rtol=2e-3, atol=2e-3)
    assert (output[5] == 7.0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_slot_that_holds_nan_spoils_no_row_that_does_not_attend_it(xformers, bad):
    """A drafted token may be one that the model makes NaN of: here row 1 of the first graph."""
    arguments = inputs()
    clean, output = torch.zeros_like(arguments[0]), torch.zeros_like(arguments[0])
    xformers_tree_attention(clean, *arguments)
    for cache in arguments[1:3]:
        cache[7, (250 + 1) % BLOCK_SIZE] = bad
    xformers_tree_attention(output, *arguments)
    others = [0, 2, 3, 4]
    assert torch.equal(output[others], clean[others])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"sliding_window": 3}, "a sliding window"),
        ({}, {"softcap": 3.0}, "a soft cap"),
        ({}, {"sinks": torch.zeros(4)}, "sinks"),
        ({"dtype": torch.float32}, {}, "float32"),
        ({"physical": "hnd"}, {}, "heads before tokens"),
        ({"block_size": 16}, {}, "blocks of 16 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(xformers, changes, options, message):
    arguments = inputs(**changes)
    with pytest.raises(ValueError, match=message):
        xformers_tree_attention(torch.empty_like(arguments[0]), *arguments, **options)


def test_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ImportError, match=r"needs xformers 0\.0\.35 or newer"):
        load_xformers()
