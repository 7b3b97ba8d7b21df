"""vLLM's Model Runner V2 with verification of token graphs.

A step has these parts. ``prepare_inputs`` assigns the nodes of the proposed graphs to the rows scheduled for them.
``prepare_attn`` gives these rows KV slots in row order and positions by depth. The tree mask is attached to the
attention metadata. The target runs once on all rows. ``sample`` walks the accepted paths and moves their KV to
contiguous slots. The speculator then drafts again. No part waits for the device to learn what was accepted.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.config.lora import LoRAConfig
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.utils import AttentionGroup

from vllm_gsd.engine.attention.layers import check_kv_groups, without_windows
from vllm_gsd.engine.observe import measure_phases
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v2.cut_rows import cut_masks, cut_rows
from vllm_gsd.engine.v2.speculator import GraphSpeculator
from vllm_gsd.engine.v2.verified_rows import DeviceStep, RowBuffers
from vllm_gsd.engine.v2.walk import GraphSampler
from vllm_gsd.engine.v2.whole_graphs import whole_graphs
from vllm_gsd.engine.verify.step import TargetLayers, check_attached
from vllm_gsd.engine.verify.target_kv import target_kv_of
from vllm_gsd.ops.walk.api import Accepted
from vllm_gsd.upstream import instances, wire


class GraphModelRunner(GPUModelRunner):
    """vLLM's V2 model runner with a ``GraphSpeculator``."""

    speculator: GraphSpeculator
    rejection_sampler: GraphSampler
    scheduled: SchedulerOutput  # the latest step as the scheduler sent it
    cut: SchedulerOutput  # what the plan has left of it
    step: DeviceStep | None = None  # set from ``prepare_inputs`` to ``sample``
    aux_hidden_states: list[torch.Tensor] | None = None  # set from ``execute_model`` to ``sample``
    moved: torch.Tensor | None = None  # with M-RoPE, int64 [rows], each row's position minus the one in row order
    features_pool: Callable[[], AbstractContextManager[Any]] = nullcontext  # the memory for hidden states
    has_dummy_loras = False  # while ``maybe_setup_dummy_loras`` is active

    @property
    def speculation(self) -> Speculation:
        """The part of speculative decoding that does not depend on the model runner."""
        return self.speculator.speculation

    # --- start-up ---------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target; the worker then calls ``load_draft``."""
        draft = self.speculation.draft_model
        self.use_aux_hidden_state_outputs = draft.reads_aux
        super().load_model(*args, **kwargs)
        if draft.aux_layers is not None:  # upstream has set those of the target's model class
            self.model.set_aux_hidden_state_layers(draft.aux_layers)

    def load_draft(self) -> None:
        """Load the draft, then install our sampler and the tree mask."""
        self.speculation.load_model(self.model)
        self.rejection_sampler = GraphSampler(self.sampler)
        self.row_buffers = RowBuffers(self.max_num_reqs, self.decode_query_len, self.device)
        self.speculator.prepare(self.req_states)
        instances.wrap(self.model_state, "prepare_attn", self._prepare_tree_rows)
        if self.model_config.uses_mrope:
            instances.wrap(self.model_state, "prepare_inputs", self._prepare_positions_of_nodes)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """KV cache specs that keep all tokens; see ``without_windows``."""
        return without_windows(super().get_kv_cache_spec())

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """Allocate the KV cache, then prepare everything that reads or moves KV."""
        check_kv_groups(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        names = self.kv_cache_config.kv_cache_groups[0].layer_names
        layers = self.compilation_config.static_forward_context
        self.target_kv = target_kv_of(layers, names, self.speculation.draft_model.layer_names)
        assert self.cudagraph_manager is not None
        instances.wrap(self.cudagraph_manager, "dispatch", self._dispatch)
        pool = nullcontext() if is_profiling else self.features_pool()
        self.speculation.prepare(self.kv_cache_config, self.attn_groups, pool)
        self.speculator.bind(self.block_tables)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Profile the sampler's memory as upstream does, with one row per request, and then with full graphs.

        Args:
            hidden_states: [num_requests, hidden].
        """
        super()._dummy_sampler_run(hidden_states)
        batch = whole_graphs(self.input_buffers, self.max_num_reqs, self.max_num_tokens, self.decode_query_len)
        rows = np.full(batch.num_reqs, self.decode_query_len, np.int32)
        num_loras = 0 if self.lora_config is None else self.lora_config.max_loras
        with self.maybe_dummy_run_with_lora(self.lora_config, rows, rows, num_active_loras=num_loras):
            logits = self.model.compute_logits(hidden_states.new_zeros((batch.num_tokens, hidden_states.shape[1])))
        step = self.rejection_sampler.step = self.speculator.lay_out(batch)
        step.lay(self.row_buffers, torch.zeros(batch.num_tokens, dtype=torch.int64, device=self.device))
        processed, penalized = self.sampler.needs_logits_processing, self.sampler.penalties_state.use_penalty
        processed[batch.idx_mapping_np] = True
        self.rejection_sampler(logits, batch)  # all rows at once
        # Half of the requests level by level. Their rows are sampled at once too, for the others' sake.
        penalized[batch.idx_mapping_np[::2]] = True
        invalid = torch.zeros(batch.num_tokens, dtype=torch.bool, device=self.device)  # as with grammars
        self.rejection_sampler(logits, batch, invalid_drafts=invalid)
        processed[batch.idx_mapping_np] = penalized[batch.idx_mapping_np] = False
        self.rejection_sampler.step = self.rejection_sampler.accepted = None

    def profile_cudagraph_memory(self) -> int:
        """Profile as upstream does, then release everything that refers to its temporary KV cache."""
        try:
            return super().profile_cudagraph_memory()
        finally:
            self.__dict__.pop("target_kv", None)  # it does not exist if no graphs were captured
            self.speculator.bind(None)
            self.speculation.release_kv_cache()

    @contextmanager
    def maybe_setup_dummy_loras(self, lora_config: LoRAConfig | None, remove_lora: bool = True) -> Iterator[None]:
        """Set dummy adapters up as upstream does, but once only, so that dummy runs inside add and remove none."""
        if self.has_dummy_loras:
            yield
            return
        self.has_dummy_loras = True
        try:
            with super().maybe_setup_dummy_loras(lora_config, remove_lora):
                yield
        finally:
            self.has_dummy_loras = False

    def measure(self) -> None:
        """Measure costs by which to plan, once everything is warm and captured."""
        if self.speculation.config.budget == "auto":
            graphs = [] if self.cudagraph_manager is None else self.cudagraph_manager.graphs
            captured = {desc.uniform_token_count - 1 for desc in graphs if desc.uniform_token_count is not None}
            self.speculator.plan.captured = sorted(captured | {0}) if captured else []
            with self.maybe_setup_dummy_loras(self.lora_config):  # not in each run, whose time it would add to
                self.speculation.planner.costs = measure_phases.measure_costs(self)

    # --- one step ---------------------------------------------------------------------------------

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Remove finished and preempted requests, also from the speculator."""
        self.speculator.forget(scheduler_output.finished_req_ids)
        self.speculator.preempt(scheduler_output.preempted_req_ids or ())
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add new and resumed requests, also to the speculator."""
        self.speculation.copies.remember(wire.attached(scheduler_output, wire.SALTS, {}))
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            self.speculator.admit(request, self.req_states.req_id_to_index[request.req_id])

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Update running requests and their draft KV."""
        super().update_requests(scheduler_output)
        self.speculation.draft_kv.update(scheduler_output)

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Run the target and measure its time. A step without tokens returns its output, with our statistics."""
        self.step = None
        if not dummy_run:
            self.scheduled, scheduler_output = scheduler_output, cut_rows(scheduler_output, self.speculator.share_of)
            self.cut = scheduler_output
        with self.speculation.stats.timed("verify_seconds"):
            output = super().execute_model(scheduler_output, intermediate_tensors, dummy_run, **kwargs)
        state = self.execute_model_state
        self.aux_hidden_states = None if state is None else state.aux_hidden_states
        if isinstance(output, ModelRunnerOutput) and not dummy_run:
            self.speculator.learn(wait=True)  # the next request may come much later
            output = copy.copy(output)  # vLLM returns the same object at all such steps
            wire.attach(output, wire.STATS, self.speculator.take_stats())
        return output

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> tuple[BatchReqState | None, int | None]:
        """Gather as upstream does. In batch-invariant mode, no CUDA graph of decodes serves a prompt's last token."""
        state, uniform = super().gather_batch_req_state(*args, **kwargs)
        prompts = envs.VLLM_BATCH_INVARIANT and state is not None and state.has_prefill
        return state, None if prompts else uniform

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        """Prepare the inputs and assign the nodes of the proposed graphs to their rows."""
        input_batch = super().prepare_inputs(*args, **kwargs)
        self.step = self.speculator.lay_out(input_batch)
        self.rejection_sampler.step = self.step
        return input_batch

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Compute KV slots from positions in row order, then lay the graphs out."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        assert self.step is not None
        listed = input_batch.positions.clone() if self.model_config.uses_mrope else None
        self.step.lay(self.row_buffers, slot_mappings[0])
        self.moved = None if listed is None else input_batch.positions - listed
        return block_tables, slot_mappings

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], token_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> None:
        """Select the adapter of each token as upstream does, and for logits that of each verified row.

        Upstream computes the logits of one row per request with an adapter, even where several rows are verified.
        """
        if self.step is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, self.step.sizes).tolist())
        super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, *args, **kwargs)

    def _prepare_positions_of_nodes(
        self, upstream: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Move M-RoPE positions, which text has in all dimensions, by depth after ``ModelState.prepare_inputs``."""
        inputs = upstream(*args, **kwargs)
        if self.step is not None and self.moved is not None:
            inputs["positions"].add_(self.moved[: inputs["positions"].shape[1]])
        return inputs

    def _prepare_tree_rows(
        self,
        upstream: Callable[..., dict[str, Any]],
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Add the tree mask to the metadata of ``ModelState.prepare_attn``."""
        metadata = upstream(input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs)
        step, layers = self.step, TargetLayers(attn_groups[0], self.speculation.draft_model.layer_names, metadata)
        full = kwargs.get("for_capture", False) or cudagraph_mode == CUDAGraphMode.FULL
        # vLLM's kernel attends full graphs of one row a request, unless rows must not depend on the batch.
        single = input_batch.num_tokens_after_padding == input_batch.num_reqs_after_padding
        full &= envs.VLLM_BATCH_INVARIANT or not single
        graphs = step if step is not None and len(step.tree_requests) else None
        if step is None:
            self.row_buffers.clear()  # a dummy batch
        if full or (graphs is not None and graphs.whole):
            assert step is None or step.whole  # upstream replays full graphs for nothing else
            num_requests, num_rows = input_batch.num_reqs, input_batch.num_tokens
            if full:
                num_requests, num_rows = input_batch.num_reqs_after_padding, input_batch.num_tokens_after_padding
            inputs = input_batch.query_start_loc, input_batch.positions, block_tables[0]
            layers.attach(self.row_buffers.rows(num_requests, num_rows, *inputs))
        elif graphs is not None:
            common = _common(input_batch, block_tables[0], slot_mappings[0])
            graphs.attach_tree_rows(self.row_buffers, layers, common)
        if full or graphs is not None:
            check_attached(self.target_kv.names, metadata)
        return metadata

    def _dispatch(
        self,
        upstream: Callable[..., BatchExecutionDescriptor],
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> BatchExecutionDescriptor:
        """Find the CUDA graph for a batch as ``CudaGraphManager.dispatch`` does, and count hits and misses.

        Upstream looks only among the full graphs with the next larger number of tokens. Of graphs for different numbers
        of rows per request, those may all be for another number than the batch has, so the larger ones are tried too.
        """
        desc = upstream(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        manager = self.cudagraph_manager
        if manager is None or not manager.needs_capture():
            return desc
        if desc.cg_mode != CUDAGraphMode.FULL and uniform_token_count is not None:
            wanted = uniform_token_count, desc.num_active_loras, desc.num_ubatches
            fitting = (
                graph
                for graph in manager.graphs
                if (graph.uniform_token_count, graph.num_active_loras, graph.num_ubatches) == wanted
                and graph.num_reqs >= num_reqs
            )
            desc = min(fitting, key=lambda graph: graph.num_reqs, default=desc)
        hit = desc.cg_mode != CUDAGraphMode.NONE
        self.speculation.stats.counts["cudagraph_hits" if hit else "cudagraph_misses"] += 1
        return desc

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture the CUDA graphs and count them."""
        size = super().capture_model(profile_only=profile_only)
        if self.cudagraph_manager is not None and not profile_only:
            counts = self.speculation.stats.counts
            counts["cudagraphs_captured"] += len(self.cudagraph_manager.graphs) + self.speculator.num_graphs
        return size

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Sample along the graphs, move the accepted KV to contiguous slots and inform the speculator.

        If the draft reads the target's hidden states, they are stored first.
        """
        step, self.step = self.step, None
        assert step is not None
        if self.speculation.features is not None:
            slots = step.slot_mapping[: input_batch.num_tokens]
            self.speculation.keep_features(slots, input_batch.positions, hidden_states, self.aux_hidden_states)
        with self.speculation.stats.timed("walk_seconds"):
            result = super().sample(hidden_states, input_batch, grammar_output)
        if input_batch.num_draft_tokens:
            accepted = self.rejection_sampler.accepted
            assert accepted is not None
            ends = accepted.last
            with self.speculation.stats.timed("compaction_seconds"):
                self._compact(accepted)
        else:
            ends = torch.zeros(input_batch.num_reqs, dtype=torch.int64, device=self.device)
        self.speculator.verified(input_batch, step, ends, result[0].sampled_token_ids, result[1])
        return result

    def _compact(self, accepted: Accepted) -> None:
        """Move the target KV of accepted nodes to the slots plain decoding would have used."""
        moves = accepted.src_slots, accepted.dst_slots
        self.target_kv.move(*moves)
        if self.speculation.features is not None:
            self.speculation.features.move(*moves)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput | ModelRunnerOutput | None:
        """Finish the step and attach its statistics to the output."""
        if grammar_output is not None:
            grammar_output = cut_masks(grammar_output, self.scheduled, self.cut)
        output = super().sample_tokens(grammar_output)
        if output is not None:
            wire.attach(output, wire.STATS, self.speculator.take_stats())
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the draft tokens, with the parents of the nodes for requests with structured output."""
        drafts = super().take_draft_token_ids()
        if drafts is not None and self.speculator.parents:
            wire.attach(drafts, wire.PARENTS, self.speculator.parents)
        return drafts


def _common(input_batch: InputBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> CommonAttentionMetadata:
    """Describe the batch for attention backends."""
    count, num_tokens = input_batch.num_reqs, input_batch.num_tokens
    return CommonAttentionMetadata(
        query_start_loc=input_batch.query_start_loc[: count + 1],
        query_start_loc_cpu=torch.from_numpy(input_batch.query_start_loc_np[: count + 1]),
        seq_lens=input_batch.seq_lens[:count],
        num_reqs=count,
        num_actual_tokens=num_tokens,
        max_query_len=int(input_batch.num_scheduled_tokens.max()),
        max_seq_len=int(input_batch.seq_lens_cpu_upper_bound.max()),
        block_table_tensor=block_table[:count],
        slot_mapping=slot_mapping[:num_tokens],
        causal=True,
        positions=input_batch.positions[:num_tokens],
    )
