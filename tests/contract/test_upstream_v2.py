"""The parts of Model Runner V2 on which ``engine.v2`` depends: a change in vLLM fails a test that names the symbol.

The sources are read and not imported, because V2 needs Triton, and only a worker may import its modules. The tests read
the installed version and the next one (``conftest.next_sources``), to show what an upgrade would need.
"""

import ast
import sys
from pathlib import Path

import pytest
import vllm

INSTALLED = Path(vllm.__file__).parent
ROOT = INSTALLED
GPU = "v1/worker/gpu"


@pytest.fixture(autouse=True, params=["installed", "next"])
def sources(request, monkeypatch):
    """Makes each test read the installed version's sources and the next one's."""
    root = INSTALLED if request.param == "installed" else request.getfixturevalue("next_sources")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", root)


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def find(path: str, name: str):
    """The definition of a class, function or method (``Class.method``) of a module."""
    node: ast.AST = tree(path)
    for part in name.split("."):
        named = (ast.ClassDef, ast.FunctionDef)
        matches = [child for child in ast.iter_child_nodes(node) if isinstance(child, named) and child.name == part]
        assert matches, f"{path} has no {name} any more"
        node = matches[0]
    return node


def parameters(path: str, name: str) -> list[str]:
    """Names of a function's parameters, without ``self``."""
    arguments = find(path, name).args
    return [argument.arg for argument in arguments.posonlyargs + arguments.args if argument.arg != "self"]


def source(path: str, name: str) -> str:
    return ast.unparse(find(path, name))


def fields(path: str, name: str) -> set[str]:
    """Annotated names in a class's body."""
    return {child.target.id for child in find(path, name).body if isinstance(child, ast.AnnAssign)}


RUNNER = f"{GPU}/model_runner.py"
CUDA_GRAPHS = f"{GPU}/cudagraph_utils.py"
SIGNATURES = [
    # engine.v2.model_runner: overridden
    (RUNNER, "GPUModelRunner.__init__", ["vllm_config", "device"]),
    (RUNNER, "GPUModelRunner.load_model", ["load_dummy_weights"]),
    (RUNNER, "GPUModelRunner.initialize_kv_cache", ["kv_cache_config", "is_profiling", "kv_cache_allocation_context"]),
    (RUNNER, "GPUModelRunner.finish_requests", ["scheduler_output"]),
    (RUNNER, "GPUModelRunner.add_requests", ["scheduler_output"]),
    (RUNNER, "GPUModelRunner.update_requests", ["scheduler_output"]),
    (RUNNER, "GPUModelRunner.gather_batch_req_state", ["scheduler_output", "dummy_run"]),
    (
        RUNNER,
        "GPUModelRunner.prepare_inputs",
        ["scheduler_output", "batch_req_state", "batch_desc", "num_active_loras"],
    ),
    (RUNNER, "GPUModelRunner.prepare_attn", ["input_batch"]),
    (
        "v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin._set_active_loras",
        ["prompt_lora_mapping", "token_lora_mapping", "lora_requests", "mapping_type"],
    ),
    (
        "v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin.maybe_setup_dummy_loras",
        ["lora_config", "remove_lora"],
    ),
    (
        "v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin.maybe_select_dummy_loras",
        ["lora_config", "num_scheduled_tokens", "mapping_type", "num_sampled_tokens", "num_active_loras"],
    ),
    (
        "v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin.maybe_dummy_run_with_lora",
        [
            "lora_config",
            "num_scheduled_tokens",
            "num_sampled_tokens",
            "remove_lora",
            "num_active_loras",
            "mapping_type",
        ],
    ),
    (RUNNER, "GPUModelRunner.sample", ["hidden_states", "input_batch", "grammar_output"]),
    (RUNNER, "GPUModelRunner.sample_tokens", ["grammar_output"]),
    (RUNNER, "GPUModelRunner.take_draft_token_ids", []),
    # engine.v2.grammars: called
    ("v1/structured_output/__init__.py", "StructuredOutputManager.grammar_init", ["request"]),
    ("v1/structured_output/__init__.py", "StructuredOutputManager.accept_tokens", ["request", "new_token_ids"]),
    # upstream.workers: replaced while a runner is built
    (f"{GPU}/spec_decode/__init__.py", "init_speculator", ["vllm_config", "device", "req_states"]),
    (RUNNER, "GPUModelRunner.capture_model", []),
    ("v1/worker/gpu_worker.py", "Worker._make_model_runner", []),
    # engine.worker_memory: overridden
    ("v1/worker/gpu_worker.py", "Worker.load_model", []),
    ("v1/worker/gpu_worker.py", "Worker.determine_available_memory", []),
    ("v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model", []),
    ("v1/worker/gpu_worker.py", "Worker.start_draft_weight_update", []),
    # engine.v2.gpu_worker: overridden
    ("v1/worker/gpu_worker.py", "Worker._maybe_activate_jit_monitor", []),
    # engine.v2.draft_graphs: called
    (
        CUDA_GRAPHS,
        "CudaGraphManager.__init__",
        [
            "vllm_config",
            "device",
            "cudagraph_mode",
            "decode_query_len",
            "lora_capture_cases",
            "varlen_decode",
            "ubatch_runner",
        ],
    ),
    (CUDA_GRAPHS, "CudaGraphManager.capture", ["create_forward_fn", "progress_bar_desc"]),
    (
        CUDA_GRAPHS,
        "CudaGraphManager.dispatch",
        ["num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len", "num_ubatches"],
    ),
    (CUDA_GRAPHS, "CudaGraphManager.run_fullgraph", ["desc"]),
    # engine.v2.walk: called or replaced
    (
        f"{GPU}/spec_decode/rejection_sampler.py",
        "RejectionSampler.__call__",
        ["logits", "input_batch", "draft_logits", "invalid_drafts"],
    ),
    (
        f"{GPU}/sample/sampler.py",
        "Sampler.sample",
        [
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "return_logprobs",
        ],
    ),
    (f"{GPU}/sample/sampler.py", "Sampler.get_logprobs_dims", ["idx_mapping_np", "include_token_ids"]),
    (
        f"{GPU}/sample/logprob.py",
        "compute_topk_scores",
        [
            "logits",
            "num_logprobs",
            "sampled_token_ids",
            "cu_num_logits",
            "logprob_token_ids_state",
            "expanded_idx_mapping",
            "max_per_req_token_ids",
            "logits_mode",
        ],
    ),
    (
        f"{GPU}/input_batch.py",
        "get_num_sampled_and_rejected",
        ["num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"],
    ),
]


@pytest.mark.parametrize(("path", "name", "expected"), SIGNATURES, ids=lambda value: value if "." in value else "")
def test_signature(path, name, expected):
    assert parameters(path, name) == expected


def test_execute_model_takes_what_is_passed_on():
    expected = ["scheduler_output", "intermediate_tensors", "dummy_run"]
    assert parameters(RUNNER, "GPUModelRunner.execute_model")[:3] == expected


def test_the_worker_makes_requests_with_grammars_from_these():
    expected = ["request_id", "prompt_token_ids", "sampling_params", "pooling_params"]
    assert parameters("v1/request.py", "Request.__init__")[:4] == expected
    assert "structured_output_manager.accept_tokens(" in source(
        "v1/core/sched/scheduler.py", "Scheduler.update_from_output"
    )


def test_a_model_state_prepares_attention_with_these():
    expected = ["input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"]
    assert parameters(f"{GPU}/model_states/default.py", "DefaultModelState.prepare_attn")[:5] == expected
    assert "self.model_state.prepare_attn(" in source(RUNNER, "GPUModelRunner.execute_model")
    expected = ["input_batch", "req_states"]
    assert parameters(f"{GPU}/model_states/default.py", "DefaultModelState.prepare_inputs") == expected


def test_a_speculator_is_asked_with_these():
    path = f"{GPU}/spec_decode/speculator.py"
    ours = tree(str(Path(__file__).parents[2] / "vllm_gsd/engine/v2/speculator.py"))
    (propose,) = [node for node in ast.walk(ours) if isinstance(node, ast.FunctionDef) and node.name == "propose"]
    assert [a.arg for a in propose.args.args if a.arg != "self"] == parameters(path, "BaseSpeculator.propose")
    abstract = [
        node.name
        for node in find(path, "BaseSpeculator").body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    assert abstract == ["init_cudagraph_manager", "capture", "propose"]
    # The runner reads the first from any speculator, and some others only from vLLM's own kind.
    assert "self.speculator.draft_logits" in source(RUNNER, "GPUModelRunner.sample")
    assert "isinstance(self.speculator, DraftModelSpeculator)" in source(RUNNER, "GPUModelRunner.load_model")


def test_slots_come_from_positions_by_place():
    """The runner computes slots before we write positions by depth, and builds attention metadata after that."""
    text = source(RUNNER, "GPUModelRunner.prepare_attn")
    assert "self.block_tables.compute_slot_mappings(" in text and "input_batch.positions" in text
    step = source(RUNNER, "GPUModelRunner.execute_model")
    order = ["self.prepare_inputs(", "self.prepare_attn(", "self.model_state.prepare_attn("]
    order += ["self.model_state.prepare_inputs(", "self.model("]
    assert [step.index(call) for call in order] == sorted(step.index(call) for call in order)


def test_requests_are_finished_before_others_get_their_slots():
    text = source(RUNNER, "GPUModelRunner.execute_model")
    order = ["self.finish_requests(", "self.add_requests(", "self.update_requests("]
    assert [text.index(call) for call in order] == sorted(text.index(call) for call in order)
    assert "scheduler_output.preempted_req_ids" in source(RUNNER, "GPUModelRunner.finish_requests")


def test_positions_and_lengths_come_from_the_device():
    text = source(RUNNER, "GPUModelRunner.prepare_inputs")
    assert "prepare_pos_seq_lens(" in text and "self.req_states.num_computed_tokens.gpu" in text


def test_the_input_batch_and_the_states_have_what_is_read():
    assert fields(f"{GPU}/input_batch.py", "InputBatch") >= {
        "req_ids",
        "num_reqs",
        "idx_mapping",
        "idx_mapping_np",
        "num_scheduled_tokens",
        "num_tokens",
        "num_draft_tokens",
        "num_draft_tokens_per_req",
        "query_start_loc",
        "query_start_loc_np",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "num_computed_tokens_np",
        "prefill_len_np",
        "is_prefilling_np",
        "has_prefill",
        "input_ids",
        "positions",
        "logits_indices",
        "cu_num_logits",
    }
    states = source(f"{GPU}/states.py", "RequestState.__init__")
    for name in ("all_token_ids", "total_len", "prefill_len", "req_id_to_index", "max_num_reqs"):
        assert f"self.{name}" in states
    tables = source(f"{GPU}/block_table.py", "BlockTables.__init__")
    for name in ("input_block_tables", "num_blocks", "block_sizes"):
        assert f"self.{name}" in tables
    output = fields(f"{GPU}/sample/output.py", "SamplerOutput")
    assert output >= {"sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"}


def test_history_is_read_where_it_is_written():
    """Penalties and bad words read the requests' own states, to which a walk appends at every step."""
    penalties = source(f"{GPU}/sample/penalties.py", "PenaltiesState.apply")
    assert "self.output_bin_counts" in penalties and "ctx.expanded_local_pos" in penalties
    bad_words = source(f"{GPU}/sample/bad_words.py", "BadWordsState.apply")
    assert "all_token_ids.gpu" in bad_words and "total_len.gpu" in bad_words
    sampler = source(f"{GPU}/sample/sampler.py", "Sampler.__init__")
    assert "self.needs_logits_processing" in sampler and "self.penalties_state" in sampler
    # vLLM commits the accepted tokens and overwrites what the walk has written there.
    assert "tl.store(all_token_ids_ptr" in source(f"{GPU}/input_batch.py", "_post_update_kernel").replace("\n", "")


def test_what_was_accepted_is_on_the_device_before_drafts_are_asked_for():
    step = source(RUNNER, "GPUModelRunner.sample_tokens")
    order = ["self.sample(", "self.postprocess_sampled(", "self.speculator.propose("]
    assert [step.index(call) for call in order] == sorted(step.index(call) for call in order)
    update = source(f"{GPU}/input_batch.py", "_post_update_kernel")
    assert "tl.store(total_len_ptr" in update and "tl.store(last_sampled_tokens_ptr" in update


def test_a_request_that_is_prefilling_has_tokens_that_the_host_knows():
    text = source(RUNNER, "GPUModelRunner.gather_batch_req_state")
    assert "is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np" in text


def test_noise_is_drawn_by_seed_and_position():
    assert {"seed", "pos"} <= set(parameters(f"{GPU}/sample/gumbel.py", "gumbel_noised_argmax"))


def test_the_cpu_worker_builds_the_runner_by_the_names_that_are_replaced():
    assert "CPUModelRunnerV2(self.vllm_config" in source("v1/worker/cpu_worker.py", "CPUWorker.init_device")
    assert "init_speculator(self.vllm_config, self.device, self.req_states)" in source(
        RUNNER, "GPUModelRunner.__init__"
    )


def test_full_cuda_graphs_read_the_buffers_that_they_were_captured_with():
    """For a capture, the model state builds the metadata; block tables and lengths are persistent buffers."""
    capture = source(CUDA_GRAPHS, "prepare_inputs_to_capture")
    assert "model_state.prepare_attn(" in capture and "for_capture=full_cudagraph" in capture
    assert "for_capture=dummy_run and" in source(RUNNER, "GPUModelRunner.execute_model")
    assert "self.input_block_tables" in source(f"{GPU}/block_table.py", "BlockTables.get_dummy_block_tables")
    dummy = source(f"{GPU}/input_batch.py", "InputBatch.make_dummy")
    for name in ("query_start_loc", "positions"):
        assert f"{name} = input_buffers.{name}[" in dummy
    assert "self.cudagraph_manager.run_fullgraph(batch_desc)" in source(RUNNER, "GPUModelRunner.execute_model")


def test_a_speculators_graphs_are_found_and_captured():
    """vLLM captures them after the target's, and releases those captured only to profile memory."""
    assert "self.speculator.capture()" in source(RUNNER, "GPUModelRunner.capture_model")
    assert "isinstance(value, CudaGraphManager)" in source(CUDA_GRAPHS, "profile_cudagraph_memory")
    manager = source(CUDA_GRAPHS, "CudaGraphManager")
    assert "self._capture_descs" in manager and "self.graphs[desc] = graph" in manager


def test_ngram_gpu_is_a_method_that_brings_nothing_along():
    """V2 gets this method instead of "custom_class", which it does not support."""
    config = (ROOT / "config/speculative.py").read_text()
    assert 'NgramGPUTypes = Literal["ngram_gpu"]' in config
    refused = source("config/vllm.py", "VllmConfig._get_v2_model_runner_unsupported_features")
    assert "'custom_class'" in refused and "ngram" not in refused
    lookahead = source("config/vllm.py", "VllmConfig.num_lookahead_tokens")
    assert "ngram" not in lookahead
    assert "get_args(NgramGPUTypes)" in (ROOT / "config/vllm.py").read_text()  # async scheduling stays on


def test_the_runner_is_chosen_by_these():
    text = source("config/vllm.py", "VllmConfig.use_v2_model_runner")
    for name in ("envs.VLLM_USE_V2_MODEL_RUNNER", "HAS_TRITON", "_get_v2_model_runner_unsupported_features()"):
        assert name in text


def test_async_scheduling_has_a_scheduler_of_its_own():
    assert [base.id for base in find("v1/core/sched/async_scheduler.py", "AsyncScheduler").bases] == ["Scheduler"]
    expected = ["draft_token_ids", "scheduler_output"]
    assert parameters("v1/core/sched/scheduler.py", "Scheduler.update_draft_token_ids_in_output") == expected


def test_statistics_ride_on_the_output_of_a_step():
    assert "self.model_runner_output = model_runner_output" in source(f"{GPU}/async_utils.py", "AsyncOutput.__init__")
    assert "return self.model_runner_output" in source(f"{GPU}/async_utils.py", "AsyncOutput.get_output")


def test_hidden_states_of_inner_layers():
    """The runner returns hidden states of the chosen layers if this flag is set before the target is loaded."""
    text = source(f"{GPU}/model_runner.py", "GPUModelRunner.load_model")
    assert "if self.use_aux_hidden_state_outputs:" in text and "set_eagle3_aux_hidden_state_layers(" in text
    assert "self.use_aux_hidden_state_outputs = False" in source(f"{GPU}/model_runner.py", "GPUModelRunner.__init__")
    assert "aux_hidden_states=aux_hidden_states" in source(f"{GPU}/model_runner.py", "GPUModelRunner.execute_model")


def test_full_graphs_are_captured_for_a_schedule_that_our_scheduler_does_not_follow():
    """``wire.speculative_config`` sets the schedule; ``GraphScheduling`` replaces its lookup by its own or by None."""
    source_of_graphs = source(CUDA_GRAPHS, "CudaGraphManager._init_candidates")
    assert "build_dynamic_sd_schedule_lookup(" in source_of_graphs and "decode_query_lens" in source_of_graphs
    schedule = source("v1/core/sched/scheduler.py", "Scheduler.schedule")
    assert "num_spec_tokens_to_schedule = self.num_spec_tokens" in schedule
    assert "if self.dynamic_sd_lookup is not None and len(num_scheduled_tokens) > 0:" in schedule


def test_requests_wait_in_two_queues():
    """``GraphScheduler.schedule`` leaves room for the first of either."""
    schedule = source("v1/core/sched/scheduler.py", "Scheduler.schedule")
    assert "request_queue = self.kv_holding_waiting" in schedule and "request_queue = self.waiting" in schedule
