"""The speculator of Model Runner V2, which proposes token graphs instead of chains."""

import weakref
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.copies import leave_out_copies
from vllm_gsd.engine.draft.limits import within_reach
from vllm_gsd.engine.observe.step_clock import StepClock
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v2.device_drafting import DeviceDrafting, KnownBatch
from vllm_gsd.engine.v2.draft_graphs import DraftGraphs
from vllm_gsd.engine.v2.grammars import WorkerGrammars
from vllm_gsd.engine.v2.host_growth import grow_on_host
from vllm_gsd.engine.v2.late_copies import LateCopies
from vllm_gsd.engine.v2.plan import DRAFTED, NO_GRAPH, Phase, Plan, late_graphs
from vllm_gsd.engine.v2.proposals import Proposals, to_host
from vllm_gsd.engine.v2.texts import Texts
from vllm_gsd.engine.v2.verified_rows import DeviceStep
from vllm_gsd.engine.verify.draft_tree import Paths
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.engine.verify.step import lay_out
from vllm_gsd.ops.flatten.api import NUM_SOURCES
from vllm_gsd.ops.growth.state import COUNTS


class Verified(NamedTuple):
    """What the host knows about a verified step at once."""

    request_ids: list[str]
    slots: np.ndarray  # int64 [num_requests]
    tenants: np.ndarray  # int64 [num_requests], the value of ``GraphSpeculator.tenants`` for these slots
    sizes: np.ndarray  # int64 [num_requests], verified rows
    batch_ends: np.ndarray  # int64 [num_requests], the end of each request's rows in the batch
    drafted: np.ndarray  # bool [num_requests], whether a graph was proposed; only the device knows the draft KV then
    kinds: np.ndarray  # int64 [num_requests], of the graphs; see ``Plan``
    phase: Phase  # that drafted them


class GraphSpeculator(BaseSpeculator):
    """Grows a graph for every request of a batch on the device, so that the host need not wait for verification.

    The host learns from the accepted tokens later, when they have been copied. It looks up what other requests'
    responses suggest for the text that it knows by then; the device skips what was accepted since. The graphs of
    requests with a grammar depend on the host. The host waits for the accepted tokens of such requests and grows their
    graphs itself, while the device drafts for the others. Tensor-parallel ranks draft from the first rank's candidates
    and learn of each step at the same time, so all draft the same graphs.
    """

    supports_mm_inputs = False
    draft_logits = None  # nodes are chosen rather than sampled
    drafting: DeviceDrafting  # set by ``prepare``, as is the plan
    plan: Plan

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.speculation = Speculation(vllm_config)
        self.device = device
        self.vllm_config = vllm_config
        self.num_rows = vllm_config.num_speculative_tokens  # nodes per request; rows are scheduled for all of them
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        num_slots, max_length = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self.texts = Texts(num_slots, max_length)
        self.requests: dict[str, NewRequestData] = {}
        self.slots: dict[str, int] = {}
        self.ends = np.zeros(num_slots, np.int64)  # the maximum number of tokens of each slot's request
        self.tenants = np.zeros(num_slots, np.int64)  # changes whenever a slot gets or loses a request
        self.plain = np.zeros(num_slots, np.bool_)  # slots of requests that are decoded as without gsd
        self.no_nodes = torch.zeros((num_slots, self.num_rows), dtype=torch.int64, device=device)
        self.draft_graphs: DraftGraphs | None = None
        self.parents: dict[str, list[int]] = {}  # of the latest nodes, for requests with structured output
        self.grammars: WorkerGrammars | None = None  # from the first request with structured output on
        self.block_tables: BlockTables | None = None
        self.proposals = Proposals(num_slots, self.num_rows, device)
        # Ranks that learned at different times would draft different graphs.
        self.late = LateCopies(device, in_step=vllm_config.parallel_config.tensor_parallel_size > 1)
        self.clock = StepClock(self.speculation.planner, pipelined=True)

    def prepare(self, req_states: RequestState) -> None:
        """Set up drafting on the device after the models are loaded."""
        ours = self.speculation
        capacity, trees = ours.graphs.capacity, self.proposals.trees
        self.drafting = DeviceDrafting(ours.config, ours.drafter, req_states, capacity, trees, self.device)
        self.plan = Plan(ours, self.texts.tokens.shape[0], self.num_rows, self.drafting.num_levels)

    def bind(self, block_tables: BlockTables | None) -> None:
        """Use V2's block tables; None releases them."""
        self.block_tables = block_tables
        if block_tables is None:
            self.drafting.unbind()
        else:
            self.drafting.bind(block_tables.input_block_tables[0], block_tables.block_sizes[0])

    @property
    def model(self) -> torch.nn.Module | None:
        """The draft model. vLLM frees it at shutdown."""
        drafter = self.speculation.drafter
        return None if drafter is None else drafter.model.model

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepare CUDA graphs of the draft phase, if possible."""
        drafting = self.drafting
        self.draft_graphs = None
        if cudagraph_mode.has_full_cudagraphs():  # whole forwards can be replayed, those of attention included
            self.draft_graphs = DraftGraphs(self.vllm_config, self.device, drafting, self.speculation.stats)
            self.plan.levels = drafting.variants
            # A weak reference, because vLLM drops the graphs that it captures to profile memory.
            drafting.cuda_graphs = weakref.ref(self.draft_graphs)

    def capture(self) -> None:
        """Capture the CUDA graphs that ``init_cudagraph_manager`` prepared."""
        if self.draft_graphs is not None:
            self.draft_graphs.capture_all()

    @property
    def num_graphs(self) -> int:
        """The number of captured draft phases: one for each batch size and number of levels."""
        return 0 if self.draft_graphs is None else len(self.draft_graphs.graphs)

    def admit(self, request: NewRequestData, slot: int) -> None:
        """Start or resume a request in a slot."""
        former = self.requests.get(request.req_id)
        # A resumed request has lost its slot. The prompt of a session's later chunk holds the text so far.
        later_chunk = former is not None and (request.req_id in self.slots or former.prompt_len != request.prompt_len)
        if later_chunk:
            self.speculation.admit(request)
            if self.grammars is not None:  # only the scheduler knows how far the grammar of the first chunk is
                self.grammars.forget([request.req_id])
        # In one process the prompt is the list of vLLM's scheduler, to which a session's later chunk adds.
        self.requests[request.req_id] = replace(request, prompt_token_ids=copy(request.prompt_token_ids))
        self.slots[request.req_id] = slot
        self.tenants[slot] += 1
        self.proposals.drop(slot)
        self.plan.admit(slot)
        self.plain[slot] = not (self.speculation.uses_graph(request) or self._grows_on_host(request))
        limit = request.sampling_params.max_tokens
        self.ends[slot] = self.texts.tokens.shape[1] if limit is None else request.prompt_len + limit
        self.speculation.drop([request.req_id])
        self.texts.begin(slot, request.prefill_token_ids, request.prompt_len)
        if self.speculation.follows_grammar(request):
            self.grammars = self.grammars or WorkerGrammars(self.vllm_config)
            if not later_chunk and self.speculation.uses_graph(request):
                self.grammars.admit(request)

    def forget(self, request_ids: Collection[str]) -> None:
        """Remove finished requests, before their slots are reused."""
        shared = self.speculation.copies.shared
        if shared is not None and request_ids:
            # The last tokens of responses have arrived, because the scheduler has seen them. Ranks in step would leave
            # them in the queue.
            self.learn(wait=self.late.in_step)
        # Sorted, because suggestions depend on the order of responses and all ranks need the same suggestions.
        for request_id in sorted(request_ids):
            record, slot = self.requests.pop(request_id, None), self.slots.pop(request_id, None)
            if slot is not None:
                self.tenants[slot] += 1
            if shared is not None and record is not None and slot is not None:
                shared.finished(request_id, record, self.texts.output(slot))
            elif shared is not None:
                shared.forget(request_id)  # a preempted request was aborted; its text is gone
            self.parents.pop(request_id, None)
        self.speculation.forget(request_ids)
        if self.grammars is not None:
            self.grammars.forget(request_ids)

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Release the slots of preempted requests, which may resume in other slots."""
        for request_id in request_ids:
            slot = self.slots.pop(request_id, None)
            if slot is not None:
                self.tenants[slot] += 1

    def share_of(self, request_id: str) -> int:
        """How many nodes of a request's next graph are verified at most."""
        slot = self.slots.get(request_id)
        if slot is not None:
            return int(self.plan.shares[slot])
        # Upstream pads a prompt of one token to the rows of a decode. None of these rows is verified, but with as many
        # rows as the other requests it fits a full CUDA graph.
        if envs.VLLM_BATCH_INVARIANT:
            return 0
        if not self.plan.active:
            return self.num_rows
        return int(self.plan.shares[list(self.slots.values())].max(initial=0)) if self.plan.captured else 0

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Propose graphs; see ``BaseSpeculator.propose``.

        Returns:
            The tokens of the flattened graphs, int64 [num_requests, num_rows], padded with zeros.
        """
        num_requests, slots = input_batch.num_reqs, input_batch.idx_mapping_np
        nothing = self.no_nodes[:num_requests]
        if dummy_run:
            if is_profile and skip_attn_for_dummy_run:
                self.profile(last_hidden_states, aux_hidden_states)
            elif is_profile:
                self.speculation.warm_up(min(64, self.max_tokens))
            return nothing
        self.parents = {}
        if num_speculative_tokens == 0 or self.plain[slots].all():
            self.clock.forget()
            self.proposals.drop(slots)
            self.plan.leave_out(slots)
            return nothing
        with self.speculation.stats.timed("draft_seconds"):
            self.clock.proposing(input_batch.req_ids, input_batch.num_tokens)
            context = int(self.texts.length[slots].sum())
            self.speculation.planner.begin(num_requests, context)
            requests = [self.requests[request_id] for request_id in input_batch.req_ids]
            on_host = np.array([self._grows_on_host(request) for request in requests], np.bool_)
            self.plan.most = self.num_rows if num_speculative_tokens is None else num_speculative_tokens
            batch = self.batch(input_batch, np.arange(num_requests))
            speculates, missed = self.speculation.speculates(batch), self._missed(batch)
            kinds = self.plan.choose(batch, speculates & batch.sampled, missed)
            (device,), (host,) = (~on_host).nonzero(), on_host.nonzero()
            if len(device):  # first, so that the device drafts while the host waits for what was accepted
                batch = batch if not len(host) else self.batch(input_batch, device)
                missed = None if missed is None else missed[device]
                self._grow_on_device(input_batch, device, batch, kinds[device], speculates[device], missed)
            if len(host):
                grow_on_host(self, input_batch, host, kinds[host])
            self.clock.proposed(input_batch.req_ids)
        return self.proposals.trees.token[input_batch.idx_mapping, 1:]

    # --- start-up ---------------------------------------------------------------------------------

    def profile(self, hidden: torch.Tensor, aux: list[torch.Tensor] | None) -> None:
        """Draft for the most requests, so that vLLM measures the memory this takes before it allocates the KV cache.

        All shapes depend only on the number of requests and the maximum length, so empty texts suffice.

        Args:
            hidden: [n, hidden], the target's hidden states of the longest step.
            aux: of each layer that the draft reads, [>= n, hidden]; None if it reads none.
        """
        count, longest = self.texts.tokens.shape
        slots, whole = np.arange(count), np.full(count, longest, np.int64)
        known = KnownBatch(
            slots=slots,
            wanted=np.ones(count, np.bool_),
            draft_length=np.zeros(count, np.int64),
            capacity=whole,
            end=whole,
            trust=np.ones((count, NUM_SOURCES), np.float32),
            factor=self.speculation.planner.calibration.factor,
            suggested=np.zeros((count, self.drafting.tree_words), np.int32),
        )
        drafter = self.speculation.drafter
        if drafter is not None:
            drafter.keep_idle(hidden, aux)
        with nullcontext() if drafter is None else drafter.model.without_kv_cache():
            self.drafting.propose(known, torch.zeros((count, 1), dtype=torch.int32, device=self.device))
        self.drafting.reset()

    def forget_warm_up(self) -> None:
        """Reset everything that was learned from vLLM's warm-up requests."""
        self.learn(wait=True)
        self.texts.clear()
        self.drafting.reset()
        self.proposals.fresh[:] = False
        self.plan.forget()
        self.parents = {}
        self.speculation.forget_warm_up()

    # --- growing ----------------------------------------------------------------------------------

    def _grows_on_host(self, request: NewRequestData) -> bool:
        """Whether the host grows the request's graphs. It does so for as long as the request lives, or never."""
        return self.speculation.follows_grammar(request) or self.speculation.traces(request)

    def _missed(self, batch: DraftBatch) -> np.ndarray | None:
        """Tokens of each request without draft KV, int64 [num_requests]; None without a draft model."""
        drafter = self.speculation.drafter
        if drafter is None:
            return None
        return drafter.missed(self.speculation.draft_kv, batch.request_ids, batch.length)

    def _grow_on_device(
        self,
        input_batch: InputBatch,
        places: np.ndarray,
        batch: DraftBatch,
        kinds: np.ndarray,
        speculates: np.ndarray,
        missed: np.ndarray | None,
    ) -> None:
        """Draft without knowing the accepted tokens, and write the graphs to ``proposals``.

        Args:
            places: int64 [n], the places in ``input_batch`` of the requests in ``batch``.
            kinds: int64 [n], from ``Plan.choose``.
            speculates: bool [n], whether the request uses graph speculation; missed: int64 [n], from ``_missed``.
        """
        speculation, slots = self.speculation, input_batch.idx_mapping_np[places]
        prompts = input_batch.is_prefilling_np[places]
        draft_length = np.full(len(slots), -1)
        if missed is not None:
            ends = input_batch.prefill_len_np[places]
            # Nothing is drafted for an answer's first token and its last.
            due = speculates & prompts & (batch.sampled | (self.ends[slots] > ends + 2))
            due = np.where(due, np.minimum(batch.length, ends), 0)
            draft_length = self._catch_up(batch, kinds, prompts, due, missed)
        if self.plan.active and not kinds.any():
            self.proposals.drop(slots)
            return
        trust, words = speculation.trust.of(batch.request_ids), self.drafting.tree_words
        if self.plan.phase.alone:  # the planner learns from graphs without copies only
            leave_out_copies(trust, kinds == DRAFTED)
        known = KnownBatch(
            slots=slots,
            wanted=kinds,
            draft_length=draft_length,
            capacity=batch.capacity,
            end=self.ends[slots],
            trust=trust,
            factor=speculation.planner.calibration.factor,
            suggested=speculation.copies.packed(batch, kinds != NO_GRAPH, trust, words),
        )
        self.drafting.propose(known, batch.block_table, self.plan.phase.levels)
        self.proposals.fresh[slots] = True

    def _catch_up(
        self, batch: DraftBatch, kinds: np.ndarray, prompts: np.ndarray, due: np.ndarray, missed: np.ndarray
    ) -> np.ndarray:
        """Run the draft over text that the host knows: of prompts, and of requests that got no draft for a while.

        Args:
            batch: the requests; the host knows ``batch.length`` tokens of each.
            kinds: int64 [num_requests], from ``Plan.choose``.
            prompts: bool [num_requests], whether the request is in its prompt; due: int64, tokens of these prompts.
            missed: int64 [num_requests], tokens without draft KV.

        Returns:
            int64 [num_requests], leading tokens with draft KV; -1 if only the device knows.
        """
        speculation, drafted = self.speculation, kinds == DRAFTED
        assert speculation.drafter is not None
        # The draft processes prompts together with the target, unless drafting does not pay.
        due = np.where(drafted | (~batch.sampled & speculation.planner.drafts_pay()), due, 0)
        # The device catches up on a step's tokens; it drafts from the last one, which must be left to it.
        behind = drafted & ~prompts & (missed > 1 + self.num_rows + speculation.draft_model.shift)
        due = np.where(behind, batch.length - 1, due)
        (reads,) = due.nonzero()
        if len(reads):
            missed = speculation.drafter.missed(speculation.draft_kv, batch.request_ids, due)[reads]
            left_out = np.setdiff1d(reads, reads[within_reach(missed, speculation.most_missed)])
            due[left_out], behind[left_out] = 0, False
            speculation.drafter.catch_up(batch, speculation.draft_kv, due, np.zeros_like(prompts))
        done = speculation.draft_kv.lengths(batch.request_ids)
        return np.where(prompts | behind | ~self.proposals.fresh[batch.token_rows], done, -1)

    def batch(self, input_batch: InputBatch, places: np.ndarray) -> DraftBatch:
        """Some requests as the host knows them; ``length`` may lag behind the device for those that got tokens."""
        assert self.block_tables is not None
        slots, texts = input_batch.idx_mapping_np[places], self.texts
        request_ids = [input_batch.req_ids[place] for place in places]
        block_table = self.block_tables.input_block_tables[0][: input_batch.num_reqs]
        if len(places) < input_batch.num_reqs:
            block_table = block_table[send(self.device, places)[0]]
        # Exact in the middle of a prompt, where nothing was drafted; otherwise an upper bound.
        computed = (input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens)[places]
        sampled = computed >= (prompts := input_batch.prefill_len_np[places])
        return DraftBatch(
            request_ids=request_ids,
            requests=[self.requests[request_id] for request_id in request_ids],
            num_outputs=texts.length[slots] - texts.prompt_length[slots],
            sampled=sampled,
            length=np.where(sampled, texts.length[slots], computed).astype(np.int64),
            whole=np.where(sampled, texts.length[slots], prompts).astype(np.int64),
            token_ids=texts.tokens,
            token_rows=slots,
            block_table=block_table,
            num_blocks=self.block_tables.num_blocks.np[0, slots].astype(np.int64),
            block_size=self.block_tables.block_sizes[0],
        )

    # --- learning ---------------------------------------------------------------------------------

    def lay_out(self, input_batch: InputBatch) -> DeviceStep:
        """Create the step that verifies the proposed graphs."""
        return DeviceStep(self.proposals, input_batch, by_row=envs.VLLM_BATCH_INVARIANT)

    def verified(
        self,
        input_batch: InputBatch,
        step: DeviceStep,
        ends: torch.Tensor,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """Start copying the results of a verified step to the host.

        Args:
            ends: int64 [num_requests], the row at which each walk ended.
            sampled: int64 [num_requests, levels], the sampled tokens.
            num_sampled: int [num_requests], the number of valid tokens in each row of ``sampled``.
        """
        slots = input_batch.idx_mapping_np
        if self.plain[slots].all() and self.speculation.copies.shared is None:
            computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
            self.speculation.stats.counts["target_steps"] += int((computed >= input_batch.prefill_len_np).sum())
            self.learn()
            return
        plan, fresh = self.plan, self.proposals.fresh[slots]
        label = Verified(
            input_batch.req_ids, slots, self.tenants[slots], step.sizes, step.batch_ends, fresh, plan.kinds[slots],
            plan.phase,
        )  # fmt: skip
        tensors = {
            "ends": ends,
            "sampled": sampled,
            "num_sampled": num_sampled,
            "draft_length": self.drafting.draft_length[input_batch.idx_mapping],
            "counts": self.drafting.counts,
        }
        if plan.active and fresh.any():
            tensors |= late_graphs(self.proposals.trees, input_batch.idx_mapping)
        if step.trees is not None:
            tensors |= step.trees._asdict()
        self.late.send(label, tensors)
        self.drafting.counts.zero_()
        self.learn()

    def learn(self, wait: bool = False) -> None:
        """Learn from the results of earlier steps that have arrived on the host, or with ``wait`` of all steps."""
        for label, tensors in self.late.take(wait):
            names = ("sampled", "num_sampled", "ends", "draft_length", "counts")
            *path, draft_length, counts = (tensors.pop(name) for name in names)
            paths = Paths(*path)
            counted = dict(zip(COUNTS, counts.tolist(), strict=True))
            self.speculation.stats.counts.update(counted)
            graphs = {name: tensors.pop(name) for name in [*tensors] if name.startswith("graph_")}
            trees = to_host(tensors) if tensors else None
            step = lay_out(trees or [None] * len(label.slots), label.sizes, label.batch_ends)
            self.speculation.observe(label.request_ids, step, paths)
            # Another request may have the slot by now.
            present = label.tenants == self.tenants[label.slots]
            self.texts.append(label.slots[present], paths.tokens[present], paths.num_tokens[present])
            drafted = np.flatnonzero(present & label.drafted)
            if (head := self.speculation.draft_model.head) is not None:
                valid = np.arange(paths.tokens.shape[1]) < paths.num_tokens[drafted, None]
                head.see(paths.tokens[drafted][valid])
            if graphs and len(drafted):
                proposed = {name: values[drafted] for name, values in graphs.items()}
                invalid = counted["draft_rows_invalid"] > 0
                self.plan.arrived(label.slots[drafted], label.kinds[drafted], label.phase, proposed, invalid)
            tracker = self.speculation.draft_kv
            for request in drafted:
                request_id, length = label.request_ids[request], int(draft_length[request])
                if length > tracker.length.get(request_id, length):
                    tracker.advance(request_id, length)
            for request_id in set(label.request_ids) - self.requests.keys():
                self.speculation.trust.forget(request_id)

    def take_stats(self) -> dict[str, Any]:
        """Return the statistics since the last call, and the most nodes that the next step verifies of a graph.

        See ``Speculation.take_stats``.
        """
        grammars = {} if self.grammars is None else self.grammars.requests
        stats = self.speculation.take_stats(self.requests, self.slots, self.parents, grammars)
        return {**stats, "planned": self.plan.widest}
