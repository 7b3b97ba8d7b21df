"""The proposer behind vLLM's V1 interface for speculative decoding."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.observe.measure import measure_costs
from vllm_gsd.engine.observe.step_clock import StepClock
from vllm_gsd.engine.schedule.text_end import ends_text
from vllm_gsd.engine.speculation import Speculation

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_gsd.engine.v1.model_runner import GraphModelRunner


class GraphProposer:
    """The proposer that vLLM's V1 runner creates for ``method="custom_class"``. It gives its batches to speculation."""

    runner: GraphModelRunner

    def __init__(self, vllm_config: VllmConfig):
        self.speculation = Speculation(vllm_config)
        self.clock = StepClock(self.speculation.planner)

    def load_model(self, target_model: torch.nn.Module) -> None:
        self.speculation.load_model(target_model)

    def bind(self, runner: GraphModelRunner) -> None:
        self.runner = runner

    def initialize_attention(self) -> None:
        """Set up drafting and measure costs, once the KV cache and the attention groups exist."""
        ours = self.speculation
        ours.prepare(self.runner.kv_cache_config, self.runner.attn_groups)
        if ours.config.budget == "auto":
            with self.runner.maybe_setup_dummy_loras(self.runner.lora_config):
                ours.planner.costs = measure_costs(self.runner, ours.drafter)

    def forget(self, request_ids: Collection[str]) -> None:
        """Store the responses of finished requests, whose records the runner still has, and drop their state."""
        shared = self.speculation.copies.shared
        # Sorted, because suggestions depend on the order of responses and all ranks need the same suggestions.
        for request_id in sorted(request_ids):
            record = self.runner.requests.get(request_id)
            if shared is not None and record is not None:
                shared.finished(request_id, record, record.output_token_ids)
        self.speculation.forget(request_ids)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request of the batch.

        Args:
            sampled_token_ids: tokens that each request has just emitted; empty for unfinished prefills.
            num_tokens_no_spec: int32 [>= num_requests], committed tokens of each request.
            token_ids_cpu: int32 [>= num_requests, max_model_len], the tokens.

        Returns:
            the draft tokens of each request's flattened graph; an empty list if there is nothing to verify.
        """
        batch = self.runner.input_batch
        count = len(sampled_token_ids)
        requests = [self.runner.requests[request_id] for request_id in batch.req_ids[:count]]
        sampled = np.array([len(tokens) > 0 for tokens in sampled_token_ids])
        computed = self.runner.optimistic_seq_lens_cpu[:count].numpy()
        block_table = batch.block_table[0]
        length = np.where(sampled, num_tokens_no_spec[:count], computed).astype(np.int64)
        whole = length.copy()
        for place in (~sampled).nonzero()[0].tolist():
            whole[place] = requests[place].num_tokens
        trees = self.speculation.propose(
            DraftBatch(
                request_ids=batch.req_ids[:count],
                requests=requests,
                num_outputs=np.array([len(request.output_token_ids) for request in requests], np.int64),
                sampled=sampled,
                ended=np.array(
                    [
                        any(ends_text(request.sampling_params, [], token) for token in tokens)
                        for request, tokens in zip(requests, sampled_token_ids, strict=True)
                    ]
                ),
                length=length,
                whole=whole,
                token_ids=token_ids_cpu,
                token_rows=np.arange(count),
                block_table=block_table.block_table.cpu[:count],
                num_blocks=block_table.num_blocks_per_row[:count].astype(np.int64),
                block_size=block_table.block_size,
            )
        )
        return [tree.drafts for tree in trees]
