"""The CUDA attention backends without a GPU: which kernel gets which rows, and with which arguments."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from references.merge import merge_attention_reference
from references.paged import paged_tree_attention_reference
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_gsd.engine.attention import cuda as cuda_attention
from vllm_gsd.engine.attention.tree_rows import AttendsTrees, TreeRows
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.upstream import wire
from vllm_gsd.upstream.workers import attention_backends

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 16, 16
PAIRS = [
    (cuda_attention.TreeFlashAttentionImpl, FlashAttentionImpl),
    (cuda_attention.TreeTritonAttentionImpl, TritonAttentionImpl),
]


def metadata_with(tree: TreeRows) -> SimpleNamespace:
    metadata = SimpleNamespace()
    wire.attach(metadata, wire.TREE_ROWS, tree)
    return metadata


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    """Replaces Triton kernels by their references; ``tests/kernels/gpu`` compares the two."""
    for kernel, reference in (
        ("paged_tree_attention", paged_tree_attention_reference),
        ("merge_attention", merge_attention_reference),
    ):
        ours, plain = (inspect.signature(op).parameters for op in (getattr(cuda_attention, kernel), reference))
        assert set(plain) - set(ours) <= {"compute"} and set(ours) <= set(plain)
        monkeypatch.setattr(cuda_attention, kernel, reference)


@pytest.fixture
def as_chosen():
    yield
    cuda_attention._chosen = "kernel"


def impl_of(cls, **changes):
    """An implementation with the attributes that vLLM's __init__ sets."""
    impl = cls.__new__(cls)
    attributes = {
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "scale": 0.25, "logits_soft_cap": 0,
        "sliding_window": (-1, -1), "alibi_slopes": None, "sinks": None, "kv_cache_dtype": "auto", **changes,
    }  # fmt: skip
    for name, value in attributes.items():
        setattr(impl, name, value)
    return impl


def batch(rows=None, plain_rows=None, **changes):
    """Two graphs of 3 and 2 rows with prefixes of 20 and 5 tokens, in vLLM's logical cache layout."""
    random = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(8, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, generator=random)
    tree = TreeRows(
        query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32),
        prefix_lens=torch.tensor([20, 5], dtype=torch.int32),
        block_table=torch.tensor([[3, 1], [6, 0]], dtype=torch.int32),
        positions=torch.tensor([20, 21, 21, 5, 6]),
        mask=torch.tensor([[1], [3], [5], [1], [3]]),
        rows=rows,
        plain_rows=plain_rows,
        plain_metadata=SimpleNamespace(name="plain"),
        max_rows=3,
        **changes,
    )
    return kv_cache, tree, torch.randn(8, HEADS, HEAD_SIZE, generator=random)


def expected(kv_cache, tree, query, **options):
    output = torch.zeros(query.shape)
    key, value = kv_cache.transpose(1, 2).split(HEAD_SIZE, -1)
    paged_tree_attention_reference(output, query, key, value, tree, 0.25, compute=torch.float32, **options)
    return output


def forward(impl, query, kv_cache, metadata, output, layer=None):
    return impl.forward(layer, query, None, None, kv_cache, metadata, output)


@pytest.mark.parametrize(("cls", "upstream"), PAIRS)
def test_without_graphs_upstream_is_called_as_ever(cls, upstream, monkeypatch):
    seen = []
    monkeypatch.setattr(upstream, "forward", lambda *arguments: seen.append(arguments) or "theirs")
    impl, metadata = impl_of(cls), SimpleNamespace()
    assert impl.forward("layer", 1, 2, 3, 4, metadata, 5) == "theirs"
    assert seen == [(impl, "layer", 1, 2, 3, 4, metadata, 5, None, None)]
    assert impl.forward("layer", 1, 2, 3, 4, None, 5) == "theirs"  # the profiling run


@pytest.mark.parametrize("cls", [pair[0] for pair in PAIRS])
@pytest.mark.parametrize(
    ("attributes", "options"),
    [
        ({}, {}),
        ({"sliding_window": (7, 0)}, {"sliding_window": 8}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"sinks": torch.tensor([0.5, 1.0, -1.0, 2.0])}, {"sinks": torch.tensor([0.5, 1.0, -1.0, 2.0])}),
    ],
    ids=["plain", "window", "soft cap", "sinks"],
)
def test_a_batch_of_graphs(cls, attributes, options):
    kv_cache, tree, query = batch()
    output = torch.full_like(query, 7.0)
    forward(impl_of(cls, **attributes), query, kv_cache, metadata_with(tree), output)
    torch.testing.assert_close(output[:5], expected(kv_cache, tree, query[:5], **options))
    assert (output[5:] == 7.0).all()  # padding


@pytest.mark.parametrize(("cls", "upstream"), PAIRS)
@pytest.mark.parametrize(
    ("rows", "plain_rows"),
    [(torch.tensor([1, 2, 4, 5, 6]), torch.tensor([0, 3, 7])), (slice(0, 5), slice(5, 8))],
    ids=["scattered", "neighbours"],
)
def test_a_mixed_batch(cls, upstream, monkeypatch, rows, plain_rows):
    """Some rows belong to graphs. vLLM attends the others, with their own metadata."""
    kv_cache, tree, query = batch(rows, plain_rows)

    def theirs(self, layer, given, key, value, cache, metadata, output, *scales):
        assert metadata.name == "plain" and torch.equal(given, query[plain_rows])
        output.copy_(2 * given)

    monkeypatch.setattr(upstream, "forward", theirs)
    output = torch.empty_like(query)
    forward(impl_of(cls), query, kv_cache, metadata_with(tree), output)
    torch.testing.assert_close(output[rows], expected(kv_cache, tree, query[rows]))
    assert torch.equal(output[plain_rows], 2 * query[plain_rows])


def test_fp8_cache_and_quantised_query():
    kv_cache, tree, query = batch()
    kv_cache = kv_cache.to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    layer = SimpleNamespace(_q_scale=torch.tensor(0.25), _k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    impl = impl_of(cuda_attention.TreeFlashAttentionImpl, kv_cache_dtype="fp8")
    quantised = (query / 0.25).to(torch.float8_e4m3fn)
    for given, meant in ((query, query), (quantised, quantised.float() * 0.25)):
        output = torch.empty_like(query)
        forward(impl, given, kv_cache.view(torch.uint8), metadata_with(tree), output, layer)
        torch.testing.assert_close(output[:5], expected(kv_cache, tree, meant[:5], **scales))


def test_queries_with_a_scale_for_each_kv_head():
    """As in checkpoints of compressed-tensors with the strategy "attn_head"."""
    kv_cache, tree, query = batch()
    kv_cache = kv_cache.to(torch.float8_e4m3fn)
    scales = {name: torch.tensor([0.5, 2.0]) for name in ("_q_scale", "_k_scale", "_v_scale")}
    by_head = scales["_q_scale"].repeat_interleave(HEADS // KV_HEADS)[:, None]
    quantised, output = (query / by_head).to(torch.float8_e4m3fn), torch.empty_like(query)
    impl = impl_of(cuda_attention.TreeFlashAttentionImpl, kv_cache_dtype="fp8")
    forward(impl, quantised, kv_cache.view(torch.uint8), metadata_with(tree), output, SimpleNamespace(**scales))
    meant, options = quantised.float() * by_head, {"k_scale": scales["_k_scale"], "v_scale": scales["_v_scale"]}
    torch.testing.assert_close(output[:5], expected(kv_cache, tree, meant[:5], **options))


@pytest.mark.parametrize("prefixes", [(20, 5), (20, 0)])
def test_flash_prefix(monkeypatch, prefixes):
    """A stand-in for FlashAttention 2, with the arguments of vLLM's own, attends the prefix.

    Its log-sum-exp of an empty prefix is inf. A prompt of one token has an empty prefix.
    """
    kv_cache, tree, query = batch()
    tree.prefix_lens.copy_(torch.tensor(prefixes))
    tree.positions[3:] -= 5 - prefixes[1]

    def flash(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, softcap, block_table,
              return_softmax_lse, fa_version):  # fmt: skip
        assert not causal and return_softmax_lse and (max_seqlen_q, max_seqlen_k, fa_version) == (3, 32, 2)
        output, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        blind = torch.zeros(len(q), 1, dtype=torch.int64)
        rows = AttendingRows(cu_seqlens_q, seqused_k, block_table, blind[:, 0], blind)
        paged_tree_attention_reference(output, q, k, v, rows, softmax_scale, softcap=softcap, lse=lse)
        return output, lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous()

    monkeypatch.setattr(cuda_attention, "_flash_attention", lambda: flash)
    monkeypatch.setattr(cuda_attention, "_chosen", "flash_prefix")
    output = torch.empty_like(query)
    metadata = metadata_with(tree)
    impl = impl_of(cuda_attention.TreeFlashAttentionImpl, logits_soft_cap=3.0, prefix_version=2)
    forward(impl, query, kv_cache, metadata, output)
    torch.testing.assert_close(output[:5], expected(kv_cache, tree, query[:5], softcap=3.0))
    with pytest.raises(NotImplementedError, match='must be "kernel"'):
        forward(
            impl_of(cuda_attention.TreeFlashAttentionImpl, sliding_window=(3, 0)), query, kv_cache, metadata, output
        )


@pytest.mark.parametrize(
    ("chosen", "layer", "refused"),
    [
        ("kernel", {}, None),
        ("kernel", {"sliding_window": (3, 0), "logits_soft_cap": 3.0, "kv_cache_dtype": "fp8"}, None),
        ("kernel", {"head_size": 256}, None),
        ("kernel", {"head_size": 512}, "heads of size 512, above 256"),
        ("flash_prefix", {"logits_soft_cap": 3.0}, None),
        ("flash_prefix", {"sliding_window": (3, 0)}, 'a sliding window with "tree_attention" "flash_prefix"'),
        ("flash_prefix", {"kv_cache_dtype": "fp8"}, 'a quantised KV cache with "tree_attention" "flash_prefix"'),
        ("xformers", {"kv_cache_dtype": "fp8_e4m3"}, 'a quantised KV cache with "tree_attention" "xformers"'),
        ("xformers", {"logits_soft_cap": 3.0}, 'a soft cap with "tree_attention" "xformers"'),
        ("xformers", {"head_size": 80}, 'heads of size 80 with "tree_attention" "xformers"'),
        ("xformers", {"sinks": torch.zeros(2)}, 'sinks with "tree_attention" "xformers"'),
    ],
)
def test_layers_that_are_refused(monkeypatch, chosen, layer, refused):
    monkeypatch.setattr(cuda_attention, "_chosen", chosen)
    for implementation in (cuda_attention.TreeFlashAttentionImpl, cuda_attention.TreeTritonAttentionImpl):
        found = impl_of(implementation, **layer).refuses()
        assert (found and found[0]) == refused
        # Rows of graphs are written without output quantization, so the compiler may not fuse it.
        assert not impl_of(implementation).fused_output_quant_supported(None)


def test_refusals():
    kv_cache, tree, query = batch()
    metadata = metadata_with(tree)
    with pytest.raises(NotImplementedError, match="output quantization"):
        impl_of(cuda_attention.TreeTritonAttentionImpl).forward(
            None, query, None, None, kv_cache, metadata, query.clone(), torch.ones(1)
        )


def test_backends_are_registered_under_their_own_names(monkeypatch):
    for name, upstream in (("FLASH_ATTN", FlashAttentionBackend), ("TRITON_ATTN", TritonAttentionBackend)):
        with attention_backends(cuda_attention.BACKENDS):
            backend = AttentionBackendEnum[name].get_class()
        assert issubclass(backend, upstream) and backend is not upstream
        builder = backend.get_builder_cls()
        assert backend.get_name() == name and issubclass(builder, upstream.get_builder_cls())
        # A full CUDA graph contains the tree kernel, so it may be replayed only for batches with graphs.
        assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
        with monkeypatch.context() as patch:
            patch.setattr(cuda_attention, "_chosen", "xformers")
            assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
        assert issubclass(backend.get_impl_cls(), upstream.get_impl_cls())
        assert issubclass(backend.get_impl_cls(), AttendsTrees)
        assert AttentionBackendEnum[name].get_class() is upstream


def test_choosing_refuses(as_chosen, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xformers", None)
    with pytest.raises(ImportError, match=r"xformers 0\.0\.35 or newer"):
        cuda_attention.choose("xformers")
    assert cuda_attention._chosen == "kernel"
