"""The speculator that Model Runner V2 asks for drafts: graphs instead of chains."""

import weakref
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_gsd.runtime.draft_batch import DraftBatch
from vllm_gsd.runtime.speculation import Speculation, has_grammar
from vllm_gsd.runtime.step import VerifyStep
from vllm_gsd.runtime.v2.draft_graphs import DraftGraphs
from vllm_gsd.runtime.v2.texts import Texts

logger = init_logger("vllm.gsd")


class V2Speculation(Speculation):
    """Nodes have rows as soon as they are drafted: the scheduler may be ahead already."""

    asks_grammar = False


class GraphSpeculator(BaseSpeculator):
    """Grows a graph for every request of the batch.

    Growth is the host's (``core``), so it waits for what was accepted and for the candidates of each draft level; the
    target's half of a step, verification, waits for nothing.

    Args:
        vllm_config: the engine's configuration.
        device: where the models are.
    """

    supports_mm_inputs = False
    draft_logits = None  # nodes are chosen, not sampled

    def __init__(self, vllm_config, device: torch.device):
        self.speculation = V2Speculation(vllm_config)
        self.device = device
        self.num_rows = vllm_config.num_speculative_tokens  # of every request, used by a node or not
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.texts = Texts(vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len)
        self.requests: dict[str, Any] = {}  # vLLM's ``NewRequestData``
        self.slots: dict[str, int] = {}
        if self.speculation.config.budget == "auto":
            logger.info(
                "gsd: with Model Runner V2 every level is drafted and %d nodes are verified; "
                '"budget": "auto" does not choose fewer yet.',
                self.num_rows,
            )
        self.draft_graphs: DraftGraphs | None = None
        self.parents: dict[str, list[int]] = {}  # of the nodes proposed last, for requests with structured output
        self.block_tables: Any = None
        self.sampled: torch.Tensor | None = None  # int64 [num_requests, levels], by the step before
        self.verified: tuple[VerifyStep, torch.Tensor] | None = None  # that step, and where its walks ended

    @property
    def model(self) -> torch.nn.Module | None:
        """The draft model, which upstream frees at shutdown."""
        drafter = self.speculation.drafter
        return None if drafter is None else drafter.model.model

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """Prepare CUDA graphs of the draft's forward; growth around it is the host's."""
        drafter = self.speculation.drafter
        self.draft_graphs = None
        if drafter is not None and DraftGraphs.possible(cudagraph_mode, drafter.model.model):
            arguments = drafter.model.model, drafter.model.layer_names, self.speculation.stats
            self.draft_graphs = DraftGraphs(drafter.model.vllm_config, self.device, *arguments)
            # Upstream lets go of those it has captured to see what memory they need.
            drafter.model.graphs = weakref.ref(self.draft_graphs)

    def capture(self) -> None:
        """See ``init_cudagraph_manager``."""
        if self.draft_graphs is not None:
            self.draft_graphs.capture_all()

    @property
    def num_graphs(self) -> int:
        """Numbers of rows that the draft is captured for."""
        return 0 if self.draft_graphs is None else self.draft_graphs.num_sizes

    def admit(self, request, slot: int) -> None:
        """A request starts or resumes.

        Args:
            request: upstream's ``NewRequestData``.
        """
        self.requests[request.req_id] = request
        self.slots[request.req_id] = slot
        self.speculation.drop([request.req_id])
        self.texts.begin(slot, request.prefill_token_ids, request.prompt_len)

    def forget(self, request_ids) -> None:
        """Requests are finished; their slots are nobody else's yet."""
        shared = self.speculation.shared
        for request_id in request_ids:
            record, slot = self.requests.pop(request_id, None), self.slots.pop(request_id, None)
            if shared is not None and record is not None and slot is not None:
                shared.finished(request_id, record.lora_request, self.texts.output(slot))
        self.speculation.forget(request_ids)

    def preempt(self, request_ids) -> None:
        """Requests have to start again; their slots may be given to others."""
        for request_id in request_ids:
            self.slots.pop(request_id, None)

    def remember(self, cache_salts: dict[str, str]) -> None:
        """New requests have these cache salts."""
        if self.speculation.shared is not None:
            self.speculation.shared.salts.update(cache_salts)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled: torch.Tensor,
        num_rejected,
        last_sampled,
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs=None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """See ``BaseSpeculator.propose``; the nodes' tokens in the order of the flattened graph, zeros behind them."""
        num_requests = input_batch.num_reqs
        tokens = np.zeros((num_requests, self.num_rows), np.int64)
        if dummy_run:
            if is_profile:
                self.speculation.warm_up(min(64, self.max_tokens))
            return torch.from_numpy(tokens).to(self.device)
        assert self.sampled is not None and self.verified is not None
        # Here the host waits for the device.
        counts = num_sampled.cpu().numpy()
        self.texts.append(input_batch.idx_mapping_np, self.sampled.cpu().numpy(), counts)
        step, places = self.verified
        self.speculation.observe(input_batch.req_ids, step, places.cpu().numpy(), counts > 0)
        batch = self._batch(input_batch, counts > 0)
        self.parents = {}
        if num_speculative_tokens == 0:
            self.speculation.drop(batch.request_ids)
            return torch.from_numpy(tokens).to(self.device)
        for row, tree in enumerate(self.speculation.propose(batch)):
            tokens[row, : len(tree.token)] = tree.token
            if has_grammar(batch.requests[row]):
                self.parents[batch.request_ids[row]] = tree.parent.tolist()
        return torch.from_numpy(tokens).to(self.device)

    def _batch(self, input_batch: InputBatch, sampled: np.ndarray) -> DraftBatch:
        slots, texts = input_batch.idx_mapping_np, self.texts
        # Exact in the midst of a prompt, where nothing was drafted.
        computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        return DraftBatch(
            request_ids=input_batch.req_ids,
            requests=[self.requests[request_id] for request_id in input_batch.req_ids],
            num_outputs=texts.length[slots] - texts.prompt_length[slots],
            sampled=sampled,
            length=np.where(sampled, texts.length[slots], computed).astype(np.int64),
            token_ids=texts.tokens,
            token_rows=slots,
            block_table=self.block_tables.input_block_tables[0][: input_batch.num_reqs],
            num_blocks=self.block_tables.num_blocks.np[0, slots].astype(np.int64),
            block_size=self.block_tables.block_sizes[0],
        )
