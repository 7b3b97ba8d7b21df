"""All vLLM symbols that we wrap, subclass or read: a change in vLLM fails a test that names the symbol."""

import dataclasses
import inspect
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from vllm import _custom_ops
from vllm.config import ModelConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.lora.ops.torch_ops import bgmv_expand
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.sampling_params import SamplingParams
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessors,
    build_logitsprocs,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker import cpu_worker, gpu_model_runner
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_gsd.engine.v1.model_runner import GraphModelRunner


def parameters(function) -> list[str]:
    """Names of a function's parameters, without ``self``."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


def field_names(cls) -> set[str]:
    """Fields of a dataclass or named tuple."""
    return set(cls._fields) if hasattr(cls, "_fields") else {f.name for f in dataclasses.fields(cls)}


SIGNATURES = [
    # upstream.hooks
    (EngineArgs.add_cli_args, ["parser"]),
    (VllmConfig.num_lookahead_tokens.fget, []),
    (
        EngineArgs._set_default_max_num_seqs_and_batched_tokens_args,
        ["usage_context", "model_config", "parallel_config"],
    ),
    # engine.v1.model_runner
    (GPUModelRunner._update_states, ["scheduler_output"]),
    (GPUModelRunner._update_streaming_request, ["req_id", "new_req_data"]),
    (GPUModelRunner._prepare_inputs, ["scheduler_output", "num_scheduled_tokens"]),
    (GPUModelRunner._calc_spec_decode_metadata, ["num_draft_tokens", "cu_num_scheduled_tokens"]),
    (GPUModelRunner._sample, ["logits", "spec_decode_metadata"]),
    (GPUModelRunner._input_fits_in_drafter, ["common_attn_metadata"]),
    (GPUModelRunner.sample_tokens, ["grammar_output"]),
    (CPUModelRunner.warming_up_model, []),
    (CPUModelRunner.__init__, ["vllm_config", "device"]),
    (GPUModelRunner.take_draft_token_ids, []),
    (GPUModelRunner.maybe_setup_dummy_loras, ["lora_config", "remove_lora"]),
    # engine.schedule.scheduler, engine.schedule.grammar
    (Scheduler.update_draft_token_ids, ["draft_token_ids"]),
    (Scheduler.get_grammar_bitmask, ["scheduler_output"]),
    (StructuredOutputManager.validate_tokens, ["request", "spec_tokens"]),
    (StructuredOutputManager._get_constraint_bounds, ["request", "spec_tokens", "spec_tokens_committed"]),
    (StructuredOutputManager._fill_bitmasks, ["batch"]),
    (StructuredOutputGrammar.accept_tokens, ["request_id", "tokens"]),
    (StructuredOutputGrammar.rollback, ["num_tokens"]),
    # engine.attention.cpu
    (
        CPUAttentionBackendImpl.forward,
        ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"],
    ),
    (CPUAttentionBackendImpl.do_kv_cache_update, ["layer", "key", "value", "kv_cache", "slot_mapping"]),
    (CPUAttentionMetadataBuilder.build, ["common_prefix_len", "common_attn_metadata", "fast_build"]),
    # upstream.workers
    (register_backend, ["backend", "class_path", "is_mamba"]),
    (
        selector._cached_get_attn_backend.__wrapped__,
        ["backend", "attn_selector_config", "num_heads", "_run_kv_cache_dtype"],
    ),
    # engine.schedule.scheduler
    (Scheduler.update_from_output, ["scheduler_output", "model_runner_output"]),
    (
        Scheduler.make_spec_decoding_stats,
        ["spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id"],
    ),
    (Scheduler._handle_stopped_request, ["request"]),
    (SpecDecodingStats.observe_draft, ["num_draft_tokens", "num_accepted_tokens"]),
    # engine.schedule.text_end
    (check_sequence_repetition, ["token_ids", "params"]),
    # engine.draft.model
    (
        SpeculativeConfig.create_draft_parallel_config,
        ["target_parallel_config", "speculative_draft_tensor_parallel_size", "draft_model_config"],
    ),
]


def test_metadata_are_built_by_the_backends_class():
    """Only the backend's own forward reads the metadata, so our builder may omit it if no row needs vLLM's kernel."""
    assert CPUAttentionBackend.get_builder_cls() is CPUAttentionMetadataBuilder
    assert "get_builder_cls()" in inspect.getsource(AttentionGroup.create_metadata_builders)
    assert "attn_group.build_metadata(" in inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert ".build(" in inspect.getsource(AttentionGroup.build_metadata)
    assert field_names(AttentionGroup) >= {"backend", "layer_names", "kv_cache_spec", "kernel_block_size"}


def test_layers_with_windows_can_be_kept_whole():
    """``replace_as`` copies all fields of a spec to the other kind, except the one that we drop (attention.layers)."""
    fields = field_names(FullAttentionSpec)
    assert field_names(SlidingWindowSpec) - fields == {"extra_retained_tokens"}
    assert "sliding_window" in fields
    assert parameters(replace_as) == ["spec", "target_cls", "drop", "changes"]
    assert 'hf_text_config, "sliding_window"' in inspect.getsource(ModelConfig.get_sliding_window)


def test_attention_may_write_its_keys_and_values_itself():
    """engine.attention.cpu updates the cache like vLLM's separate op: same conditions, slots and views of the cache."""
    assert CPUAttentionBackend.forward_includes_kv_cache_update is False
    source = inspect.getsource(attention.Attention.forward)
    for condition in (
        "not self.attn_backend.forward_includes_kv_cache_update",
        "self.kv_sharing_target_layer_name is None",
        "key is not None",
        "value is not None",
    ):
        assert source.count(condition) >= 2, condition
    source = inspect.getsource(attention.get_attention_context)
    assert "slot_mapping = forward_context.slot_mapping" in source and "slot_mapping.get(layer_name)" in source
    assert "if layer_slot_mapping is not None" in inspect.getsource(attention.unified_kv_cache_update)
    source = inspect.getsource(CPUAttentionBackendImpl.do_kv_cache_update)
    assert "if self.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER):" in source
    assert "(num_blocks, num_kv_heads, block_size * 2, -1)" in source and "kv_cache.chunk(2, dim=2)" in source
    assert "self.kv_sharing_target_layer_name = " in inspect.getsource(CPUAttentionBackendImpl.__init__)


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signature(function, expected):
    assert parameters(function) == expected


@pytest.mark.parametrize(
    ("cls", "needed"),
    [
        (SchedulerOutput, {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"}),
        (SchedulerOutput, {"scheduled_spec_decode_tokens", "total_num_scheduled_tokens"}),
        (NewRequestData, {"req_id", "block_ids", "num_computed_tokens"}),
        (CachedRequestData, {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"}),
        (SamplerOutput, {"sampled_token_ids", "logprobs_tensors"}),
        (LogprobsTensors, {"logprob_token_ids", "logprobs", "selected_token_ranks"}),
        (SchedulerStats, {"kv_connector_stats", "spec_decoding_stats"}),
        (EngineArgs, {"speculative_config", "additional_config", "worker_cls", "scheduler_cls"}),
        (EngineArgs, {"async_scheduling", "watermark_config"}),
        (ModelConfig, {"hf_text_config", "max_model_len"}),
        (
            CommonAttentionMetadata,
            {
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "block_table_tensor",
                "slot_mapping",
                "is_prefilling",
            },
        ),
    ],
)
def test_fields(cls, needed):
    assert needed <= field_names(cls)


def test_sampling_metadata_is_known_completely():
    """``walk`` slices every field by request, so it must know all fields."""
    assert field_names(SamplingMetadata) == {
        "temperature",
        "all_greedy",
        "all_random",
        "top_p",
        "top_k",
        "generators",
        "max_num_logprobs",
        "no_penalties",
        "prompt_token_ids",
        "frequency_penalties",
        "presence_penalties",
        "repetition_penalties",
        "output_token_ids",
        "allowed_token_ids_mask",
        "bad_words_token_ids",
        "logitsprocs",
        "logprob_token_ids",
        "spec_token_ids",
        "thinking_budget_state_holder",
    }


def test_logprob_token_ids_of_one_request_hide_the_top_ones_of_others():
    """A bug of vLLM's V1, which tests and docs/support.toml avoid: other requests get token 0 at minus infinity."""
    fields = dict.fromkeys(field_names(SamplingMetadata))
    fields |= {"all_greedy": True, "all_random": False, "no_penalties": True, "bad_words_token_ids": {}}
    fields |= {"max_num_logprobs": 2, "logprob_token_ids": {0: [3, 4]}, "logitsprocs": LogitsProcessors()}
    scores = Sampler()(torch.arange(16.0).view(2, 8), SamplingMetadata(**fields)).logprobs_tensors
    assert scores.logprob_token_ids.tolist() == [[7, 3, 4], [7, 0, 0]]
    assert scores.logprobs[1].isinf().tolist() == [False, True, True]


def test_model_runner_output_takes_our_attribute():
    """The worker's statistics are an extra attribute of the output, which slots would forbid."""
    assert not hasattr(ModelRunnerOutput, "__slots__")


def test_draft_tokens_and_scheduler_output_take_our_attributes():
    drafts = DraftTokenIds([], [])
    drafts.gsd_trees = {}
    assert pickle.loads(pickle.dumps(drafts)).gsd_trees == {}
    assert not hasattr(SchedulerOutput, "__slots__")
    assert field_names(GrammarOutput) == {"structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts"}


def test_worker_builds_the_runner_by_module_name():
    source = inspect.getsource(cpu_worker.CPUWorker.init_device)
    assert "CPUModelRunner(self.vllm_config" in source


def test_processors_are_built_by_the_name_that_is_wrapped():
    assert gpu_model_runner.build_logitsprocs is build_logitsprocs
    assert parameters(build_logitsprocs)[0] == "vllm_config"
    assert "build_logitsprocs(" in inspect.getsource(GPUModelRunner.__init__)
    assert parameters(SamplingParams._validate_spec_decode) == ["speculative_config"]


def test_custom_class_proposer_is_called_after_bookkeeping():
    source = inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    assert 'spec_config.method == "custom_class"' in source
    assert "self.input_batch.token_ids_cpu" in source


def test_dummy_runs_with_lora():
    assert {"num_tokens", "remove_lora", "num_active_loras"} <= set(parameters(GPUModelRunner._dummy_run))
    names = ["lora_config", "num_scheduled_tokens"]
    assert parameters(GPUModelRunner.maybe_select_dummy_loras)[:2] == names
    assert "num_active_loras" in parameters(GPUModelRunner.maybe_select_dummy_loras)
    assert {"enable_lora", "max_num_seqs", "max_num_batched_tokens"} <= field_names(EngineArgs)


def test_lora_on_the_cpu_gives_rows_without_adapter_the_last_slots():
    """A bug of vLLM 0.32 that 0.33 fixes. Our advice to leave a slot free can be removed with support for 0.32."""
    slots, result = torch.tensor([[[[0.0]]], [[[5.0]]]]), torch.zeros(2, 1)
    bgmv_expand(torch.ones(2, 1), slots, result, torch.tensor([0, -1]))
    assert result.tolist() == [[0.0], [5.0 if vllm.__version__.startswith("0.32.") else 0.0]]


def test_metric_hooks():
    assert issubclass(loggers.PrometheusStatLogger._kv_connector_cls, KVConnectorProm)
    assert "KVConnectorLogging(" in inspect.getsource(loggers.LoggingStatLogger)
    assert "self._kv_connector_cls(" in inspect.getsource(loggers.PrometheusStatLogger.__init__)
    assert parameters(KVConnectorProm.__init__) == ["vllm_config", "labelnames", "per_engine_labelvalues"]
    for kind in ("counter", "gauge", "histogram"):
        assert hasattr(KVConnectorProm, f"_{kind}_cls")


def test_block_allocation_is_capped_at_max_model_len():
    """Lookahead slots must not reach past max_model_len."""
    source = inspect.getsource(KVCacheManager.allocate_slots)
    assert "self.max_model_len" in source


def test_sampler_and_forward_context():
    assert {"logits", "sampling_metadata"} <= set(parameters(Sampler.forward))
    assert {"attn_metadata", "vllm_config", "num_tokens", "slot_mapping"} <= set(parameters(set_forward_context))


def test_lm_heads_of_ones_own_rows():
    """This method accepts ``TrimmedHead`` as a layer, and the logits processor accepts its logits as input."""
    assert parameters(UnquantizedEmbeddingMethod.process_weights_after_loading) == ["layer"]
    assert parameters(UnquantizedEmbeddingMethod.apply) == ["layer", "x", "bias"]
    assert "self.logits_as_input" in inspect.getsource(LogitsProcessor.forward)


def test_int8_products():
    """``Int8Rows`` calls these functions like vLLM's own W8A8 kernel for CPUs."""
    keys = ["weight", "weight_scales", "output_type", "dynamic_quant", "use_azp", "primitive_cache_size"]
    assert parameters(_custom_ops.create_onednn_scaled_mm) == keys
    assert parameters(_custom_ops.onednn_scaled_int8_quant) == ["input", "scale", "azp", "symmetric"]
    keys = ["dnnl_handler", "x", "output", "input_scale", "input_zp", "input_zp_adj", "bias"]
    assert parameters(_custom_ops.onednn_scaled_mm) == keys


def test_weights_are_packed_here():
    """``PacksWeights`` replaces this function while a model is loaded, and layers look it up when they call it."""
    assert parameters(utils.dispatch_cpu_unquantized_gemm) == ["layer", "remove_weight"]
    assert parameters(utils.cpu_unquantized_gemm) == ["layer", "x", "weight", "bias"]
    assert "layer.cpu_linear(x, weight, bias)" in inspect.getsource(utils.cpu_unquantized_gemm)
    # Embeddings and LM heads, which may be tied, look up rows and multiply through their quantization method.
    assert parameters(UnquantizedEmbeddingMethod.embedding) == ["layer", "input_"]
    assert "layer.weight = embed_tokens.weight" in inspect.getsource(UnquantizedEmbeddingMethod.tie_weights)
    assert "quant_method.embedding(self," in inspect.getsource(VocabParallelEmbedding.forward)
    assert (
        "if self.head_dtype is None or self.head_dtype == hidden_states.dtype:\n            return lm_head.quant_method"
        in (inspect.getsource(LogitsProcessor._apply_head))
    )
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        source = inspect.getsource(method.process_weights_after_loading)
        assert "utils import dispatch_cpu_unquantized_gemm" in source
    assert "load_dummy_weights" in parameters(cpu_worker.CPUWorker.load_model)


def test_worker_memory_stands_on_these():
    assert parameters(cpu_worker.CPUWorker.determine_available_memory) == []
    assert parameters(cpu_worker.CPUWorker.compile_or_warm_up_model) == []
    assert parameters(cpu_worker.CPUWorker.start_draft_weight_update) == []
    spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    assert (spec.block_size, spec.page_size_bytes) == (16, 16 * 2 * 3 * 64 * 2)


def test_shared_suffixes_read_these():
    assert "output_token_ids" in field_names(CachedRequestState)
    assert "lora_request" in field_names(CachedRequestState)
    assert "cache_salt" in parameters(Request)


def test_the_bench_finds_what_suffix_decoding_remembers():
    assert "self.suffix_cache = SuffixDecodingCache(" in inspect.getsource(SuffixDecodingProposer.__init__)


def test_block_table_attributes():
    source = inspect.getsource(BlockTable.__init__)
    for name in ("self.block_table", "self.num_blocks_per_row", "self.slot_mapping", "self.block_size"):
        assert f"{name} = " in source
    # Slots are written into the tensor, which need not share memory with the buffer's array.
    assert "self.slot_mapping.gpu," in inspect.getsource(BlockTable.compute_slot_mapping)


def test_cpu_backend_can_be_overridden():
    assert AttentionBackendEnum.CPU_ATTN.name == "CPU_ATTN"


@pytest.mark.parametrize("drafts", [[0], [3], [0, 0], [3, 0, 2, 0, 1]], ids=str)
@pytest.mark.parametrize("prompt", [0, 100])
def test_rows_that_need_logits(drafts, prompt):
    """Our indices equal vLLM's. Our metadata omits the fields that only vLLM's rejection sampler reads."""
    runner = object.__new__(GraphModelRunner)
    runner.arange_np, runner._arange_scratch = np.arange(500), np.empty(500, np.int64)
    runner.device, runner.all_rows = torch.device("cpu"), torch.arange(500)
    runner.input_ids = SimpleNamespace(gpu=torch.zeros(500, dtype=torch.int32))
    num_drafts = np.array(drafts, np.int32)
    ends = np.cumsum(num_drafts + 1 + prompt * (num_drafts == 0))
    ours = runner._calc_spec_decode_metadata(num_drafts, ends)
    theirs = super(GraphModelRunner, runner)._calc_spec_decode_metadata(num_drafts, ends)
    assert ours.logits_indices.tolist() == theirs.logits_indices.tolist()
    assert (ours.num_draft_tokens, ours.max_spec_len) == (theirs.num_draft_tokens, theirs.max_spec_len)


# --- engine.v1.processors ------------------------------------------------------------------------------


def test_adapters_call_what_they_hold_for_each_row():
    """The walk may remove callables of ended requests from ``req_info``."""
    called = []

    class Adapter(AdapterLogitsProcessor):
        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            return lambda output_ids, logits: called.append(output_ids) or logits

    adapter = Adapter(None, torch.device("cpu"), False)
    outputs = [[0], [1]]
    added = [(row, SamplingParams(), None, output) for row, output in enumerate(outputs)]
    adapter.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    assert adapter.req_info.keys() == {0, 1}
    adapter.req_info = {1: adapter.req_info[1]}
    adapter.update_state(None)
    adapter.apply(torch.zeros(2, 4))
    assert len(called) == 1 and called[0] is outputs[1]


def test_built_in_processors_are_known_by_their_classes():
    made = build_logitsprocs(
        SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=4)),
        torch.device("cpu"),
        False,
        False,
    )
    assert {type(one) for one in made.all} == set(BUILTIN_LOGITS_PROCESSORS)


@pytest.mark.parametrize("places", [[0], [3], [2, 90], range(100)], ids=str)
def test_the_best_token_beside_nan_is_torchs(places):
    """vLLM's greedy choice is torch's argmax, also with NaN; ``ops.topk_softmax.argmax_of_walks`` does the same."""
    logits = torch.randn(2, 100)
    logits[1, list(places)] = torch.nan
    assert torch.equal(Sampler.greedy_sample(logits), logits.argmax(1))
