"""The draft model inside vLLM: same loader, same paged KV pool, same block tables as the target."""

import gc
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import replace
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_gsd.config import draft_vocab
from vllm_gsd.config.eagle_folder import is_eagle_config
from vllm_gsd.cpu.packed_weights import uses_cpu_kernels
from vllm_gsd.engine.attention.tree_rows import TreeRows, TreeRowsOnly
from vllm_gsd.engine.draft.trimmed_head import TrimmedHead
from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.ops.topk.api import topk_softmax
from vllm_gsd.upstream import drafts, wire

# Most bytes for logits of the draft at a time, and what one takes: itself, its float32 copy, and its exponential.
MAX_LOGITS_BYTES = 1 << 30
LOGIT_BYTES = 12


class DraftModel:
    """Loads the draft model and runs it over rows of the current batch.

    Args:
        vllm_config: the target engine's configuration.
        model: path or hub id of the draft.
        tensor_parallel_size: the draft's, or None for the target's.
        vocab_size: tokens its LM head computes, or None for what its folder says.
    """

    has_kv_cache = True

    def __init__(self, vllm_config: VllmConfig, model: str, tensor_parallel_size: int | None, vocab_size: int | None):
        self.vllm_config = vllm_config
        self.model_config = draft_model_config(vllm_config.model_config, model)
        self.tensor_parallel_size = tensor_parallel_size
        self.token_ids = trimmed_vocab(self.model_config, vocab_size)
        # Whether it reads the target's hidden states, and has neither embedding nor LM head of its own.
        self.reads_features = is_eagle_config(self.model_config.hf_config.to_dict())
        self.head: TrimmedHead | None = None
        self.model: Any = None
        self.layer_names: list[str] = []
        self.builders: list[tuple[Any, list[str]]] = []  # of attention metadata, and the draft's layers of each
        self.device = torch.device(vllm_config.device_config.device_type)
        # The draft's CUDA graphs while there are any; they belong to who captures them.
        self.graphs: Callable[[], Any] = lambda: None

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state."""
        return self.model_config.get_hidden_size()

    def load(self, target_model: Any = None) -> None:
        """Load the weights; the draft's attention layers register themselves beside the target's.

        Args:
            target_model: whose embedding and LM head a draft shares that has none.
        """
        from vllm.compilation.backends import set_model_tag

        layer_type: Any = AttentionLayerBase
        before = set(get_layers_from_vllm_config(self.vllm_config, layer_type))
        target = self.vllm_config.parallel_config
        parallel = SpeculativeConfig.create_draft_parallel_config(
            target, self.tensor_parallel_size or target.tensor_parallel_size, self.model_config
        )
        config = replace(
            self.vllm_config,
            quant_config=None,
            lora_config=None,  # adapters are the target's
            model_config=self.model_config,
            parallel_config=replace(parallel, rank=target.rank),
        )
        if self.reads_features:
            drafts.with_draft_config(config, self.model_config)
        with set_model_tag("draft_model"), _parallel_group(parallel.tensor_parallel_size):
            self.model = get_model(vllm_config=config, prefix="draft_model")
        self.layer_names = sorted(set(get_layers_from_vllm_config(self.vllm_config, layer_type)) - before)
        if self.reads_features:
            drafts.share_ends(self.model, target_model)
            gc.collect()  # its own ends refer to themselves, and vLLM exempts from collection what is there later
        if self.token_ids is not None:
            head, size = self.model.lm_head, self.model_config.get_vocab_size()
            kernels = uses_cpu_kernels(self.vllm_config)
            lookup = partial(head_rows, head)
            self.head = TrimmedHead(lookup, size, self.token_ids, self.device, kernels=kernels)
            # What it does after the LM head (scale, soft cap) is the model's own business still.
            drafts.take_logits(self.model)

    def bind_attention(self, attention_groups) -> None:
        """Remember the metadata builders of the draft's layers once the KV cache exists.

        Raises:
            ValueError: a layer of the draft is in none of the groups.
        """
        # A group may hold target layers too; its builder serves either. Layers of unlike shapes are in several groups.
        own = [(group, [name for name in group.layer_names if name in self.layer_names]) for group in attention_groups]
        self.builders = [(group.get_metadata_builder(0), names) for group, names in own if names]
        found = {name for _, names in self.builders for name in names}
        if missing := sorted(set(self.layer_names) - found):
            raise ValueError(
                f"gsd: the draft model's layer {missing[0]} has no KV cache; only attention drafts are supported."
            )

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        """A host array where the model is; nothing waits for it."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def run_idle(self, num_tokens: int) -> torch.Tensor:
        """Run over zeros without KV cache: compiles the model, and shows what a level costs.

        Returns:
            hidden states [num_tokens, hidden], meaningless.
        """
        with set_forward_context(None, self.vllm_config, num_tokens=num_tokens):
            tokens = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
            positions = torch.arange(num_tokens, device=self.device)
            features = None
            if self.reads_features:
                dtype = self.model_config.dtype
                features = torch.zeros((num_tokens, self.hidden_size), dtype=dtype, device=self.device)
            return self._call(tokens, positions, features)

    def run_causal(
        self, tokens, positions, slots, query_start_loc, seq_lens, block_table, features=None
    ) -> torch.Tensor:
        """Run rows of committed text.

        Args:
            tokens, positions: int64 numpy [n]; slots: int64 tensor [n].
            query_start_loc: int32 numpy [num_requests + 1]; seq_lens: int32 numpy [num_requests], rows included.
            block_table: int32 tensor [num_requests, max_blocks].
            features: hidden states [n, hidden] before the rows, of a draft that reads them.

        Returns:
            hidden states [n, hidden].
        """
        lengths = query_start_loc[1:] - query_start_loc[:-1]
        positions = self.to_device(positions)
        common = CommonAttentionMetadata(
            query_start_loc=self.to_device(query_start_loc),
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens=self.to_device(seq_lens),
            num_reqs=len(seq_lens),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )
        by_layer: dict[str, Any] = {}
        for builder, names in self.builders:
            by_layer |= dict.fromkeys(names, builder.build(0, common))
        return self._run(tokens, positions, slots, by_layer, features)

    def run_level(self, tokens, tree: TreeRows, slots, features=None) -> torch.Tensor:
        """Run one draft level: every row attends along its own path of the graph.

        Args:
            tokens: int64 numpy [n]; slots: int64 tensor [n].
            features: of ``run_causal``; here the draft's own, of the rows' parents.

        Returns:
            hidden states [n, hidden].
        """
        metadata = TreeRowsOnly()
        wire.attach_tree_rows(metadata, tree)
        return self._run(tokens, tree.positions, slots, dict.fromkeys(self.layer_names, metadata), features)

    def run_rows(self, tokens: torch.Tensor, slots: torch.Tensor, tree: TreeRows, features=None) -> torch.Tensor:
        """Run rows that lie on the device already.

        Args:
            tokens: int32 [n]; slots: int64 [n], -1: the row's key and value are kept nowhere.
            tree: how the rows attend, and their positions.
            features: of ``run_level``.

        Returns:
            hidden states [n, hidden].
        """
        metadata = TreeRowsOnly()
        wire.attach_tree_rows(metadata, tree)
        return self._forward(tokens, tree.positions, slots, dict.fromkeys(self.layer_names, metadata), features)

    def _run(self, tokens: np.ndarray, positions: torch.Tensor, slots, by_layer, features) -> torch.Tensor:
        return self._forward(self.to_device(tokens.astype(np.int32)), positions, slots, by_layer, features)

    @contextmanager
    def without_kv_cache(self):
        """Let rows attend nothing and write nothing: memory is profiled before there is a KV cache."""
        self.has_kv_cache = False
        try:
            yield
        finally:
            self.has_kv_cache = True

    def _forward(self, input_ids, positions, slots, by_layer: dict[str, Any], features) -> torch.Tensor:
        count = len(input_ids)
        if not self.has_kv_cache:
            return self.run_idle(count)
        graphs = self.graphs()
        size = None if graphs is None else graphs.size_for(count)
        if size is not None:
            return graphs.replay(size, input_ids, positions, slots, by_layer)
        with set_forward_context(
            by_layer,
            self.vllm_config,
            num_tokens=count,
            slot_mapping=dict.fromkeys(self.layer_names, slots),
        ):
            return self._call(input_ids, positions, features)

    def _call(self, input_ids, positions, features) -> torch.Tensor:
        if not self.reads_features:
            return self.model(input_ids=input_ids, positions=positions, inputs_embeds=None)
        # Twice: one for the LM head, one for the next level. They are the same here.
        return self.model(input_ids=input_ids, positions=positions, hidden_states=features)[1]

    def candidates(self, hidden: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The most probable next tokens after hidden states [n, hidden].

        Returns:
            probabilities float32 [n, k], falling, and tokens int64 [n, k].
        """
        probs, tokens = self.most_probable(hidden, k)
        return from_first_rank(probs.cpu().numpy()), from_first_rank(tokens.cpu().numpy())

    def most_probable(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``candidates``, left where they are and this rank's own. Logits take at most ``MAX_LOGITS_BYTES``."""
        width = self.model_config.get_vocab_size() if self.head is None else len(self.head.ids)
        parts = hidden.split(max(1, MAX_LOGITS_BYTES // (LOGIT_BYTES * width)))
        if len(parts) == 1:
            return self._most_probable(hidden, k)
        probs, tokens = zip(*(self._most_probable(part, k) for part in parts), strict=True)
        return torch.cat(probs), torch.cat(tokens)

    def _most_probable(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.head is None:
            return topk_softmax(self.model.compute_logits(hidden), k)
        logits = self.head.hide(self.model.logits_processor(None, self.head(hidden)))
        probs, places = topk_softmax(logits, k)
        return probs, self.head.tokens_of(places)


@contextmanager
def _parallel_group(size: int):
    """Load a model whose tensor-parallel size is the target's, or 1: a copy on every rank.

    Layers ask for the group when they are made, and remember its size.
    """
    target = parallel_state.get_tp_group()
    if size == target.world_size:
        yield
        return
    alone = parallel_state.init_model_parallel_group(
        [[rank] for rank in range(parallel_state.get_world_group().world_size)],
        parallel_state.get_world_group().local_rank,
        torch.distributed.get_backend(target.device_group),
        group_name=wire.DRAFT_GROUP,
    )
    with drafts.tensor_parallel_group(alone):
        yield


def head_rows(lm_head: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows [n, hidden] of an LM head that may be spread over ranks; all of them ask for the same tokens, int64 [n]."""
    if lm_head.tp_size == 1:
        return lm_head.quant_method.embedding(lm_head, ids)
    shard = lm_head.shard_indices
    own = (ids >= shard.org_vocab_start_index) & (ids < shard.org_vocab_end_index)
    rows = lm_head.quant_method.embedding(lm_head, torch.where(own, ids - shard.org_vocab_start_index, 0))
    return parallel_state.get_tp_group().all_reduce(rows.masked_fill_(~own[:, None], 0.0))


def trimmed_vocab(model: ModelConfig, wanted: int | None) -> np.ndarray | None:
    """Ascending token ids, int64, whose logits the draft computes; None for all."""
    stored = get_hf_file_to_dict(draft_vocab.FILE, model.model, model.revision)
    return draft_vocab.choose_draft_vocab(stored, model.get_vocab_size(), wanted)


def draft_model_config(target: ModelConfig, model: str) -> ModelConfig:
    """The draft's ModelConfig, following the target's where vLLM's own draft models do."""
    return ModelConfig(
        model=model,
        runner="draft",
        tokenizer=target.tokenizer,
        tokenizer_mode=target.tokenizer_mode,
        trust_remote_code=target.trust_remote_code,
        dtype=target.dtype,
        seed=target.seed,
        max_model_len=None,
        spec_target_max_model_len=target.max_model_len,
        enforce_eager=target.enforce_eager,
        max_logprobs=target.max_logprobs,
        config_format=target.config_format,
    )
