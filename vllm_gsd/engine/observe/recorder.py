"""Records the steps of requests that ask for it with ``extra_args={"gsd_trace": true}``, if ``gsd.json`` names a file.

A proposal opens a step, the target's verification fills it, and the next proposal writes it, because the request's
text then shows what was emitted. Other requests' texts are never recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

from vllm_gsd.engine.draft.batch import DraftBatch, GraphRequests
from vllm_gsd.engine.observe.step_record import Step, Text
from vllm_gsd.engine.observe.trace_file import TraceFile
from vllm_gsd.engine.schedule.text_end import ends_text
from vllm_gsd.method.constants import NONE
from vllm_gsd.method.flatten import FlatTrees
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.upstream import wire

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gsd.config import GSDConfig
    from vllm_gsd.engine.observe.stats import GraphStats
    from vllm_gsd.engine.verify.step import VerifyStep
    from vllm_gsd.planner.planner import Planner

# Of the records' format. Increment it when a field changes its meaning or goes.
VERSION = 1
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


def recorder_of(vllm_config: VllmConfig, config: GSDConfig, stats: GraphStats) -> Recorder:
    """The recorder of an engine. The first tensor-parallel rank alone writes a file, if the config names one."""
    first = not model_parallel_is_initialized() or get_tp_group().rank_in_group == 0
    file = TraceFile(config.trace) if config.trace is not None and first else None
    return Recorder(config, file, vllm_config.model_config, stats)


class Recorder:
    """Follows the traced requests of an engine, none without a file. The methods are called in the order of a step."""

    def __init__(self, config: GSDConfig, file: TraceFile | None, model_config: ModelConfig, stats: GraphStats):
        self.config, self.file, self.model_config, self.stats = config, file, model_config, stats
        self.traced: dict[str, _Traced] = {}
        # The traced requests of the batch and their indices in it, and those whose graphs grow and their graphs.
        self.batch: list[tuple[int, _Traced]] = []
        self.growing: list[tuple[int, _Traced]] = []

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, loaded for the first traced request; None in engines without one."""
        return None if self.model_config.skip_tokenizer_init else cached_tokenizer_from_config(self.model_config)

    @cached_property
    def text(self) -> Text:
        """Gives the text of a token after another. Some tokenizers write a space only between tokens."""

        @lru_cache(1 << 14)
        def text(before: int, token: int) -> str:
            if self.tokenizer is None:
                return f"#{token}"
            if before != NONE:
                left, both = self.tokenizer.decode([before]), self.tokenizer.decode([before, token])
                if both.startswith(left) and len(both) > len(left):
                    return both[len(left) :]
            return self.tokenizer.decode([token])

        return text

    def admit(self, request_id: str, request: Any) -> None:
        """Begin to follow a new request, or a later chunk of a session of streaming input, if it asks for a trace."""
        params = request.sampling_params
        self.traced.pop(request_id, None)
        if self.file is None or not wire.asks_for_trace(params):
            return
        prompt = list(request.prompt_token_ids or ())
        self.traced[request_id] = _Traced(request_id, prompt, params)
        self.file.append(
            {
                "event": "request",
                "version": VERSION,
                "request": request_id,
                "target": self.model_config.model,
                "prompt": self.tokenizer.decode(prompt) if self.tokenizer is not None else "",
                "prompt_tokens": len(prompt),
                "sampling": {name: getattr(params, name) for name in SAMPLING},
                "gsd": self.config.model_dump(mode="json", exclude={"trace"}),
            }
        )

    def begin(self, batch: DraftBatch) -> None:
        """Write the steps that ended with the tokens that ``batch`` has gained, and open the next ones."""
        self.batch, self.growing = [], []
        if self.file is None or not self.traced:
            return
        self.began = time.perf_counter()
        self.forwards, self.rows = (self.stats.counts[name] for name in ("draft_forwards", "draft_rows"))
        found = ((index, self.traced.get(request_id)) for index, request_id in enumerate(batch.request_ids))
        self.batch = [(index, traced) for index, traced in found if traced is not None]
        for index, traced in self.batch:
            end, new = int(batch.length[index]), int(batch.num_outputs[index]) - traced.num_outputs
            if batch.sampled[index] and new > 0 and not traced.ended:
                tokens = batch.token_ids[batch.token_rows[index], end - new : end].tolist()
                self.file.append(traced.end_step(tokens, end - new, self.tokenizer, self.text))

    def level(self, frontier: np.ndarray, frontier_len: np.ndarray, tokens: np.ndarray, probs: np.ndarray) -> None:
        """Keep the candidates of a draft level; arguments as for ``add_candidates``."""
        if not self.growing:
            return
        ends = frontier_len.cumsum()
        for row, traced in self.growing:
            lines = slice(int(ends[row] - frontier_len[row]), int(ends[row]))
            traced.step.ran(frontier[row, : frontier_len[row]].tolist(), tokens[lines], probs[lines])

    def block(self, graphs: GraphBatch, drafted: np.ndarray, tokens: np.ndarray, probs: np.ndarray) -> None:
        """Keep the candidates of drafted blocks, which are in the graphs; arguments as for ``add_lattices``."""
        lines = drafted.cumsum() - 1
        for row, traced in self.growing:
            if not drafted[row]:
                continue
            line, nodes = lines[row], np.arange(graphs.size[row])
            depth_of, is_merged = graphs.depth[row, nodes], graphs.merged[row, nodes] != NONE
            places = np.zeros(1, np.int64)  # of the parents among the candidates of the depth before
            for depth, (chosen, chances) in enumerate(zip(tokens[line], probs[line], strict=True)):
                parents = nodes[(depth_of == depth) & ~is_merged]
                if depth:
                    places = (graphs.token[row, parents, None] == tokens[line, depth - 1]).argmax(axis=1)
                candidates = np.where(chances[places] > 0, chosen, NONE)  # without merging, most edges are left out
                traced.step.ran(parents.tolist(), candidates, chances[places])

    def grows(self, requests: GraphRequests) -> None:
        """Note which graphs of the coming levels are traced."""
        if not self.batch:
            return
        row_of = {index: row for row, index in enumerate(requests.index.tolist())}
        self.growing = [(row_of[index], traced) for index, traced in self.batch if index in row_of]
        for _, traced in self.growing:
            traced.step.candidates = []

    def drafted(self, graphs: GraphBatch, trees: FlatTrees, most: int) -> None:
        """Copy the graphs that have grown, of which at most ``most`` nodes each will be verified."""
        for row, traced in self.growing:
            traced.step.drafted(graphs, row, trees.node[row, 1 : 1 + min(most, int(trees.size[row]))])

    def proposed(self, planner: Planner, drafts: bool) -> None:
        """Note the numbers of drafting; ``drafts`` is whether there is a draft model."""
        if not self.batch:
            return
        counts = self.stats.counts
        numbers = {
            "requests": planner.num_requests,
            "plan": planner.plan if drafts else "copies",
            "rates": [float(f"{rate:.4g}") for rate in planner.rates],
            "draft_forwards": counts["draft_forwards"] - self.forwards,
            "draft_rows": counts["draft_rows"] - self.rows,
            "draft_ms": round(1e3 * (time.perf_counter() - self.began), 3),
        }
        for _, traced in self.batch:
            traced.step.numbers = dict(numbers)

    def verified(self, request_ids: list[str], step: VerifyStep, places: np.ndarray, has_tree: np.ndarray) -> None:
        """Copy what the target verified, and where each walk ended; ``has_tree`` is bool [num_requests]."""
        if not self.traced:
            return
        counts = self.stats.counts
        for index, request_id in enumerate(request_ids):
            if (traced := self.traced.get(request_id)) is None:
                continue
            if has_tree[index]:
                traced.step.verified(step, index, int(places[index]))
            for part in ("verify", "walk", "compaction"):
                traced.step.numbers[f"{part}_ms"] = round(1e3 * counts[f"{part}_seconds"], 3)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop finished requests."""
        for request_id in request_ids:
            self.traced.pop(request_id, None)


class _Traced:
    """A traced request: its text so far and its open step."""

    def __init__(self, request_id: str, prompt: list[int], params: SamplingParams):
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.output: list[int] = []  # its answer so far
        self.num_outputs = self.num_steps = 0
        self.ended = False
        self.step = Step()
        self.pieces: list[str] | None = None
        self.offsets = 0, 0

    def end_step(self, tokens: list[int], length: int, tokenizer: Any, text: Text) -> dict[str, Any]:
        """The record of the open step, which emitted ``tokens`` after ``length`` tokens; opens the next."""
        self.num_outputs += len(tokens)
        self.num_steps += 1
        tokens = self._answer(tokens)
        texts = [f"#{token}" if tokenizer is None else self._next_text(token, tokenizer) for token in tokens]
        step, self.step = self.step, Step()
        head = {"event": "step", "request": self.request_id, "step": self.num_steps, "length": length}
        return {**head, **step.record(tokens, texts, text)}

    def _answer(self, tokens: list[int]) -> list[int]:
        """Append ``tokens`` to the answer and return them, without those behind its end."""
        before = len(self.output)
        for token in tokens:
            self.ended = ends_text(self.params, self.output, token) or len(self.output) + 1 == self.params.max_tokens
            self.output.append(token)
            if self.ended:
                break
        return self.output[before:]

    def _next_text(self, token: int, tokenizer: Any) -> str:
        """The text that an emitted token adds; empty until a character is complete."""
        ids = [*self.prompt, token] if self.pieces is None else [token]
        new, text, *offsets = detokenize_incrementally(tokenizer, ids, self.pieces, *self.offsets)
        if self.pieces is None:
            self.pieces = []
        self.pieces += new
        self.offsets = offsets[0], offsets[1]
        return text
