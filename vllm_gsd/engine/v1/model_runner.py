"""vLLM's V1 CPU model runner, extended to verify token graphs.

One step: ``_prepare_inputs`` matches the scheduled draft tokens with flattened graphs and sets their positions by
depth. ``_build_attention_metadata`` adds the tree mask. The target runs once over all rows. ``_sample`` walks the
accepted paths and moves their KV to contiguous slots. Then the proposer drafts again.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _set_global_compilation_settings

from vllm_gsd.engine.attention.cpu import no_rows_left
from vllm_gsd.engine.attention.layers import check_kv_groups, without_windows
from vllm_gsd.engine.attention.tree_rows import serves_chains
from vllm_gsd.engine.observe.measure import idle_tokens
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v1.processors import tell_of_processors
from vllm_gsd.engine.v1.walk import walk
from vllm_gsd.engine.verify.draft_tree import FlatTree, Paths
from vllm_gsd.engine.verify.step import TargetLayers, VerifyStep, check_attached, lay_out
from vllm_gsd.engine.verify.target_kv import target_kv_of
from vllm_gsd.host import kv_moves
from vllm_gsd.upstream import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

NO_ROWS = torch.empty(0, dtype=torch.int32)


class GraphModelRunner(CPUModelRunner):
    """A ``CPUModelRunner`` whose drafter is a ``GraphProposer``."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.step: VerifyStep | None = None
        self.masks_chains = serves_chains(vllm_config, self.device, self.model_config)
        self.drafter.bind(self)
        self.use_aux_hidden_state_outputs = self.speculation.draft_model.reads_aux
        self.all_rows = torch.arange(self.max_num_tokens)
        self.idle_runs = itertools.count()
        tell_of_processors(self.input_batch.logitsprocs)

    @property
    def speculation(self) -> Speculation:
        """The part of speculation that both runners share."""
        return self.drafter.speculation

    # --- start-up ---------------------------------------------------------------------------------

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        # Upstream reads them from the speculative config, which has no draft model here.
        return self.speculation.draft_model.aux_layers

    def warming_up_model(self) -> None:
        super().warming_up_model()
        with _set_global_compilation_settings(self.vllm_config):
            self.speculation.warm_up(min(64, self.max_num_tokens))

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return without_windows(super().get_kv_cache_spec())

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Allocate the KV cache, then set up drafting and KV moves for it."""
        check_kv_groups(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        group = self.kv_cache_config.kv_cache_groups[0]
        layers = self.compilation_config.static_forward_context
        self.target_kv = target_kv_of(layers, group.layer_names, self.speculation.draft_model.layer_names)
        self.drafter.initialize_attention()

    def run_idle(self, num_tokens: int) -> torch.Tensor:
        """Run the target without a KV cache, and compute the logits of all rows.

        Rows hold different tokens, because a mixture of experts runs the experts that its tokens choose. With LoRA,
        every row uses an adapter. The caller must have set up dummy adapters.
        """
        num_loras = 0 if self.lora_config is None else 1
        rows = np.ones(num_tokens, np.int32)
        with torch.inference_mode():
            tokens = self.input_ids.gpu[:num_tokens]
            tokens.copy_(idle_tokens(num_tokens, self.model_config.get_vocab_size(), next(self.idle_runs)))
            if self.supports_mm_inputs:  # upstream embeds the tokens of such a target outside of it
                self.inputs_embeds.gpu[:num_tokens].copy_(self.model.embed_input_ids(tokens))
            hidden, _ = self._dummy_run(num_tokens, remove_lora=False, num_active_loras=num_loras)
            # The dummy run selects adapters for the logits of one row per request. Here all rows need one.
            with self.maybe_select_dummy_loras(self.lora_config, rows, num_active_loras=num_loras):
                return self.model.compute_logits(hidden[:num_tokens])

    # --- one step ---------------------------------------------------------------------------------

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable | None:
        self.speculation.draft_kv.update(scheduler_output)
        self.drafter.forget(scheduler_output.finished_req_ids)
        self.speculation.copies.remember(wire.attached(scheduler_output, wire.SALTS, {}))
        return super()._update_states(scheduler_output)

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        request = super()._update_streaming_request(req_id, new_req_data)
        self.speculation.admit(request)
        return request

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None]:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.step = self._matched_step(scheduler_output)
        listed = self.positions.clone() if self.uses_mrope else None
        self.step.set_positions(self.positions)
        if listed is not None:  # text after images advances by one in every dimension
            moved = self.positions - listed
            self.mrope_positions.gpu[:, : len(moved)].add_(moved)
        return result

    def _matched_step(self, scheduler_output: SchedulerOutput) -> VerifyStep:
        """Match the scheduled draft tokens with the proposed trees, and lay the trees out.

        The scheduler may cut a tree's list of tokens. If the scheduled tokens are not a prefix of the request's tree,
        only its root is sampled.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        kept = wire.attached(scheduler_output, wire.KEPT, {})
        request_ids = self.input_batch.req_ids
        sizes = np.ones(len(request_ids), np.int64)
        matched: list[FlatTree | None] = [None] * len(request_ids)
        for index, request_id in enumerate(request_ids):
            tokens = scheduled.get(request_id)
            if not tokens:
                continue
            sizes[index] += len(tokens)
            tree = self.speculation.trees.get(request_id)
            if tree is not None and request_id in kept:
                tree = tree.select(kept[request_id])
            if tree is not None and tree.drafts[: len(tokens)] == tokens:
                matched[index] = tree
        starts = self.query_start_loc.np[: len(request_ids) + 1]
        step = lay_out(matched, sizes, starts[1:].astype(np.int64))
        if self.masks_chains:  # lone rows too: another kernel would give them other bits
            step.batch_starts = starts.astype(np.int32)
        return step

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        """Set only which rows need logits. The walk does not use upstream's rejection sampler."""
        num_rows, rows = len(num_draft_tokens) + int(num_draft_tokens.sum()), self.all_rows
        if num_rows < cu_num_scheduled_tokens[-1]:  # there are prompts in the batch
            sizes = num_draft_tokens + 1
            rows = torch.from_numpy(np.repeat(cu_num_scheduled_tokens - np.cumsum(sizes), sizes)) + rows[:num_rows]
        return SpecDecodeMetadata(
            draft_token_ids=NO_ROWS,
            num_draft_tokens=num_draft_tokens.tolist(),
            cu_num_draft_tokens=NO_ROWS,
            cu_num_sampled_tokens=NO_ROWS,
            target_logits_indices=NO_ROWS,
            bonus_logits_indices=NO_ROWS,
            logits_indices=rows[:num_rows],
        )

    def _build_attention_metadata(
        self, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], CommonAttentionMetadata | None]:
        # Upstream's metadata is not built if our kernel serves all rows.
        with no_rows_left(self.step is not None and self.step.batch_starts is not None):
            attn_metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self.step is not None and self.step.masked:
            layers = TargetLayers(self.attn_groups[0], self.speculation.draft_model.layer_names, attn_metadata)
            self.step.attach_tree_rows(layers, common)
            check_attached(self.target_kv.names, attn_metadata)
        elif self.step is not None and self.step.drafted:
            for name in self.target_kv.names:
                wire.attach(attn_metadata[name], wire.TREE_ROWS, None)
        return attn_metadata, common

    def execute_model(self, *args: Any, **kwargs: Any) -> ModelRunnerOutput | IntermediateTensors | None:
        """Run and time the target. A step without tokens returns its output here, with our statistics."""
        with self.speculation.stats.timed("verify_seconds"):
            output = super().execute_model(*args, **kwargs)
        if isinstance(output, ModelRunnerOutput):
            output = copy.copy(output)  # vLLM shares one object among all such steps
            wire.attach(output, wire.STATS, self.speculation.take_stats())
        return output

    @torch.inference_mode()
    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors:
        """Sample as upstream does. Store hidden states for the draft before, and attach the step's statistics after."""
        state = self.execute_model_state
        if state is not None and self.speculation.features is not None:
            count = state.scheduler_output.total_num_scheduled_tokens
            slots = self._slot_mapping()[:count].long()
            self.speculation.keep_features(slots, self.positions, state.hidden_states, state.aux_hidden_states)
        with self._generators_of_unfinished_prompts_set_aside():
            output = super().sample_tokens(grammar_output)
        wire.attach(output, wire.STATS, self.speculation.take_stats())
        return output

    @contextmanager
    def _generators_of_unfinished_prompts_set_aside(self) -> Iterator[None]:
        """Draw nothing from the generators of requests whose sampled token is discarded.

        Upstream takes the draw back by an offset, which generators on CPUs do not have: a seeded request whose prompt
        is cut into chunks would end the engine.
        """
        generators = self.input_batch.generators
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
        discarded = np.flatnonzero(mask).tolist() if generators else []
        kept = {place: generators.pop(place) for place in discarded if place in generators}
        try:
            yield
        finally:
            generators.update(kept)

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> list[list[int]] | torch.Tensor:
        request_ids, clock = self.input_batch.req_ids, self.drafter.clock
        clock.proposing(request_ids, scheduler_output.total_num_scheduled_tokens)
        with self.speculation.stats.timed("draft_seconds"):
            drafts = super().propose_draft_token_ids(scheduler_output, *args, **kwargs)
        clock.proposed(request_ids)
        return drafts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the draft tokens, with the trees of requests with structured output attached."""
        drafts = super().take_draft_token_ids()
        trees = self.speculation.take_grammar_trees()
        if trees:
            drafts = drafts or DraftTokenIds([], [])
            wire.attach(drafts, wire.PROPOSED, trees)
        return drafts

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        step, self.step = self.step, None
        assert step is not None and logits is not None
        requests = [self.requests[request_id] for request_id in self.input_batch.req_ids]
        with self.speculation.stats.timed("walk_seconds"):
            output, paths = walk(
                self.sampler,
                logits,
                self.input_batch.sampling_metadata,
                step.trees,
                [request.output_token_ids for request in requests],
                stateful=any(map(_has_processor, requests)),
                params=(request.sampling_params for request in requests),
            )
        with self.speculation.stats.timed("compaction_seconds"):
            self._compact(step, paths)
        emitted = np.where(self.discard_request_mask.np[: len(requests)], 0, paths.num_tokens)
        self.speculation.observe(self.input_batch.req_ids, step, paths._replace(num_tokens=emitted))
        return output

    def _compact(self, step: VerifyStep, paths: Paths) -> None:
        """Move the target KV of accepted nodes to the slots that plain decoding would have used."""
        rows = kv_moves(step.trees.parent, step.trees.starts, paths.last, step.first_rows)
        if len(rows[0]) == 0:
            return
        slots = self._slot_mapping().numpy()
        sources, destinations = (torch.from_numpy(slots[those].astype(np.int64)) for those in rows)
        self.target_kv.move(sources, destinations)
        if self.speculation.features is not None:
            self.speculation.features.move(sources, destinations)

    def _slot_mapping(self) -> torch.Tensor:
        """The KV slots of the step's rows, int64 [>= num_rows].

        Upstream computes them into this tensor only. The buffer's array is the same memory in the batch that a CPU
        runner makes at first, but not in the one that replaces it when the block size is chosen after loading.
        """
        return self.input_batch.block_table[0].slot_mapping.gpu

    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        # Upstream stops drafting for the whole batch when one request nears max_model_len. The proposer limits that
        # request only.
        return common_attn_metadata is not None


def _has_processor(request: CachedRequestState) -> bool:
    """Whether one of vLLM's built-in logits processors is active for the request."""
    params = request.sampling_params
    return params.min_tokens > len(request.output_token_ids) or params.min_p > 0 or bool(params.logit_bias)
