"""The draft model inside vLLM. It shares the model loader, the KV cache and the block tables with the target."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import replace
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_gsd.config import draft_vocab
from vllm_gsd.config.draft_check import kind_of_model, local_folder
from vllm_gsd.config.draft_kind import AUX_KINDS, EAGLE3, EAGLE_KINDS, LANGUAGE_MODEL, MTP, kind_of_config
from vllm_gsd.cpu.packed_weights import uses_cpu_kernels
from vllm_gsd.engine.attention.layers import attention_layers
from vllm_gsd.engine.attention.tree_rows import TreeRows, TreeRowsOnly
from vllm_gsd.engine.draft.aux_states import aux_layers, uses_aux_states
from vllm_gsd.engine.draft.trimmed_head import TrimmedHead
from vllm_gsd.engine.observe.measure import idle_tokens
from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.ops.topk.api import topk_softmax
from vllm_gsd.upstream import drafts, wire

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.v1.worker.utils import AttentionGroup

# Maximum bytes for the draft's logits at a time, and most bytes per logit; ``topk_softmax`` copies none.
MAX_LOGITS_BYTES = 1 << 30
LOGIT_BYTES = 4
# The target's settings that say which checkpoint is read, and whether it is quantised as it is read.
OF_CHECKPOINT = ("revision", "code_revision", "quantization", "quantization_config")


class NoDraft:
    """What runners ask of a draft model, for an engine without one."""

    layer_names: Sequence[str] = ()
    reads_aux = False
    aux_layers: tuple[int, ...] | None = None
    shift = 0
    head: TrimmedHead | None = None


class DraftModel:
    """Loads the draft model, by path or hub id, and runs it over rows of the current batch.

    Args:
        tensor_parallel_size: None for the target's.
        vocab_size: number of tokens whose logits the draft computes; None for the number stored with the model.
    """

    has_kv_cache = True
    kind = LANGUAGE_MODEL
    # 1 if row j of the draft holds token j + 1, beside the target's state of token j, as in EAGLE-3 heads and MTP
    # modules: the first token of a text has no row.
    shift = 0
    # The tokens of a draft's own vocabulary, int64; None if it has the target's.
    target_ids: torch.Tensor | None = None

    def __init__(self, vllm_config: VllmConfig, model: str, tensor_parallel_size: int | None, vocab_size: int | None):
        self.vllm_config = vllm_config
        self.model_config = draft_model_config(vllm_config.model_config, model)
        self.tensor_parallel_size = tensor_parallel_size
        # The tokens whose logits the draft computes, int64 and ascending; None for all tokens.
        stored = get_hf_file_to_dict(draft_vocab.FILE, self.model_config.model, self.model_config.revision)
        self.token_ids = draft_vocab.choose_draft_vocab(stored, self.model_config.get_vocab_size(), vocab_size)
        hf_config = self.model_config.hf_config
        self.kind = kind_of_config(hf_config.to_dict())
        # EAGLE drafts read the target's hidden states and may share its embedding and LM head.
        self.reads_features = self.kind in EAGLE_KINDS
        # Whether the target must also return hidden states of inner layers, and of which; None for its own choice.
        self.reads_aux = self.kind in AUX_KINDS and uses_aux_states(hf_config)
        self.aux_layers = aux_layers(hf_config) if self.reads_aux else None
        self.shift = int(self.kind in (EAGLE3, MTP))
        # Tokens that a draft of whole blocks predicts at once; None for other kinds. ``BlockDrafter`` sets it.
        self.block_depth: int | None = None
        self.head: TrimmedHead | None = None
        self.model: Any = None
        self.layer_names: list[str] = []
        self.builders: list[tuple[Any, list[str]]] = []  # metadata builders and their draft layers
        self.idle_runs = itertools.count()
        self.device = torch.device(vllm_config.device_config.device_type)

    @property
    def hidden_size(self) -> int:
        return self.model_config.get_hidden_size()

    def features_of(self, hidden: torch.Tensor, aux: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """What is stored of the target's hidden states: one row per token, and combined once.

        Args:
            hidden: [n, hidden], of the last layer.
            aux: of each of ``aux_layers``, [>= n, hidden]; None if the draft reads none.

        Returns:
            [n, ``hidden_size``].
        """
        if not self.reads_aux:
            return hidden
        assert aux is not None
        return self.model.combine_hidden_states(torch.cat([states[: len(hidden)] for states in aux], dim=-1))

    def load(self, target_model: Any = None) -> None:
        """Load the weights. An EAGLE draft shares the embedding and the LM head of the loaded target.

        The draft's attention layers are registered in the target's engine configuration.
        """
        from vllm.compilation.backends import set_model_tag

        before = set(attention_layers(self.vllm_config))
        target = self.vllm_config.parallel_config
        parallel = SpeculativeConfig.create_draft_parallel_config(
            target, self.tensor_parallel_size or target.tensor_parallel_size, self.model_config
        )
        config = replace(
            self.vllm_config,
            quant_config=None,
            lora_config=None,  # LoRA adapters apply to the target only
            model_config=self.model_config,
            parallel_config=replace(parallel, rank=target.rank),
        )
        is_head = self.kind != LANGUAGE_MODEL
        if is_head:
            drafts.with_draft_config(config, self.model_config, self.block_depth)
        if config.quant_config is not None:
            drafts.name_layers_as_stored(config.quant_config)
        with set_model_tag("draft_model"), _parallel_group(parallel.tensor_parallel_size):
            self.model = get_model(vllm_config=config, prefix=drafts.PREFIX)
        if supports_multimodal(self.model):  # a draft reads the text and the placeholders of images
            self.model = self.model.get_language_model()
        self.layer_names = sorted(set(attention_layers(self.vllm_config)) - before)
        if is_head:
            drafts.share_ends(self.model, target_model)
            # The replaced embedding and LM head are in reference cycles. Free them before vLLM freezes the collector.
            gc.collect()
        if (offsets := getattr(self.model, "draft_id_to_target_id", None)) is not None:
            self.target_ids = torch.arange(len(offsets), device=self.device) + offsets
        if self.token_ids is not None:
            head, size = self.model.lm_head, self.model_config.get_vocab_size()
            kernels = uses_cpu_kernels(self.vllm_config)
            lookup = partial(head_rows, head)
            self.head = TrimmedHead(lookup, size, self.token_ids, self.device, kernels=kernels)
            # The model still applies its own scale and soft cap to the logits.
            drafts.take_logits(self.model)

    def bind_attention(self, attention_groups: Sequence[AttentionGroup]) -> None:
        """Store the attention metadata builders of the draft's layers. Call it once the KV cache exists.

        Raises:
            ValueError: a draft layer is in none of the groups.
        """
        # A group may also contain target layers. Draft layers of different shapes are in different groups.
        own = [(group, [name for name in group.layer_names if name in self.layer_names]) for group in attention_groups]
        self.builders = [(group.get_metadata_builder(0), names) for group, names in own if names]
        found = {name for _, names in self.builders for name in names}
        if missing := sorted(set(self.layer_names) - found):
            raise ValueError(
                f"gsd: the draft model's layer {missing[0]} has no KV cache; only attention drafts are supported."
            )

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        """Copy a host array to the model's device without waiting."""
        return torch.from_numpy(values) if self.device.type == "cpu" else send(self.device, values)[0]

    def run_idle(self, num_tokens: int) -> torch.Tensor:
        """Run over different tokens without a KV cache, to compile the model or to measure the cost of a level.

        Returns:
            meaningless hidden states [num_tokens, hidden].
        """
        with set_forward_context(None, self.vllm_config, num_tokens=num_tokens):
            tokens = idle_tokens(num_tokens, self.model_config.get_vocab_size(), next(self.idle_runs)).to(self.device)
            positions = torch.arange(num_tokens, device=self.device)
            features = None
            if self.reads_features:
                dtype = self.model_config.dtype
                features = torch.zeros((num_tokens, self.hidden_size), dtype=dtype, device=self.device)
            return self._call(tokens, positions, features)

    def run_causal(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        slots: torch.Tensor,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: torch.Tensor,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the draft over committed text with causal attention.

        Args:
            tokens, positions: int64 numpy [n].
            slots: KV slots, int64 tensor [n].
            query_start_loc: int32 numpy [num_requests + 1].
            seq_lens: int32 numpy [num_requests], including these rows.
            block_table: int32 tensor [num_requests, max_blocks].
            features: for EAGLE drafts, the target's hidden states [n, hidden] of the tokens before the rows.

        Returns:
            hidden states [n, hidden].
        """
        lengths = query_start_loc[1:] - query_start_loc[:-1]
        device_positions = self.to_device(positions)
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
            positions=device_positions,
        )
        by_layer: dict[str, Any] = {}
        for builder, names in self.builders:
            by_layer |= dict.fromkeys(names, builder.build(0, common))
        return self._forward(self.tokens(tokens), device_positions, slots, by_layer, features)

    def tokens(self, tokens: np.ndarray) -> torch.Tensor:
        """Tokens, int64 [n] on the host, as the model reads them."""
        return self.to_device(tokens.astype(np.int32))

    def run_rows(
        self, tokens: torch.Tensor, slots: torch.Tensor, tree: TreeRows, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the draft over rows of which each attends along its own path of the token graph.

        Args:
            tokens: int32 [n].
            slots: KV slots, int64 [n]. The key and value of a row with slot -1 are not stored.
            tree: how the rows attend, and their positions.
            features: for EAGLE drafts, the draft's own hidden states [n, hidden] of the rows' parents.

        Returns:
            hidden states [n, hidden].
        """
        metadata = TreeRowsOnly()
        wire.attach(metadata, wire.TREE_ROWS, tree)
        return self._forward(tokens, tree.positions, slots, dict.fromkeys(self.layer_names, metadata), features)

    @contextmanager
    def without_kv_cache(self) -> Iterator[None]:
        """Neither read nor write KV within this context. Memory is profiled before the KV cache exists."""
        self.has_kv_cache = False
        try:
            yield
        finally:
            self.has_kv_cache = True

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        by_layer: dict[str, Any],
        features: torch.Tensor | None,
    ) -> torch.Tensor:
        count = len(input_ids)
        if not self.has_kv_cache:
            return self.run_idle(count)
        slot_mapping = dict.fromkeys(self.layer_names, slots)
        with set_forward_context(by_layer, self.vllm_config, num_tokens=count, slot_mapping=slot_mapping):
            return self._call(input_ids, positions, features)

    def _call(self, input_ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        if not self.reads_features:
            return self.model(input_ids=input_ids, positions=positions, inputs_embeds=None)
        outputs = self.model(input_ids=input_ids, positions=positions, hidden_states=features)
        if self.kind == MTP:
            return outputs
        # EAGLE models return one output for the LM head and one for the next level. Those of EAGLE-3 differ, and stand
        # side by side in the hidden states of a row.
        return torch.cat(outputs, dim=1) if self.kind == EAGLE3 else outputs[1]

    def next_features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the rows below rows with hidden states ``hidden`` read of them, [n, ``hidden_size``]."""
        return hidden[:, -self.hidden_size :].contiguous()

    def candidates(self, hidden: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most probable next tokens for hidden states [n, hidden], the same on every tensor-parallel rank.

        Returns:
            descending probabilities, float32 [n, k], and their tokens, int64 [n, k].
        """
        probs, tokens = self.most_probable(hidden, k)
        return from_first_rank(probs.cpu().numpy()), from_first_rank(tokens.cpu().numpy())

    def most_probable(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's ``candidates``, on the device. Logits are computed in parts of at most MAX_LOGITS_BYTES."""
        ids = self.target_ids if self.head is None else self.head.ids
        width = self.model_config.get_vocab_size() if ids is None else len(ids)
        parts = hidden.split(max(1, MAX_LOGITS_BYTES // (LOGIT_BYTES * width)))
        if len(parts) == 1:
            return self._most_probable(hidden, k)
        probs, tokens = zip(*(self._most_probable(part, k) for part in parts), strict=True)
        return torch.cat(probs), torch.cat(tokens)

    def _most_probable(self, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == EAGLE3:
            hidden = hidden[:, : self.hidden_size]
        if self.target_ids is not None:  # the model would spread these logits over the target's vocabulary
            probs, places = topk_softmax(self.model.logits_processor(self.model.lm_head, hidden), k)
            return probs, self.target_ids[places]
        if self.head is None:
            return topk_softmax(self.model.compute_logits(hidden), k)
        logits = self.head.hide(self.model.logits_processor(None, self.head(hidden)))
        probs, places = topk_softmax(logits, k)
        return probs, self.head.tokens_of(places)


@contextmanager
def _parallel_group(size: int) -> Iterator[None]:
    """Build layers for tensor-parallel size ``size``: the target's, or 1 for a full copy on every rank.

    Layers read the size from the tensor-parallel group when they are constructed.
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


def head_rows(lm_head: ParallelLMHead, ids: torch.Tensor) -> torch.Tensor:
    """Rows [n, hidden] of an LM head that may be sharded over ranks. All ranks give the same ``ids``, int64 [n]."""
    if lm_head.tp_size == 1:
        return lm_head.quant_method.embedding(lm_head, ids)
    shard = lm_head.shard_indices
    own = (ids >= shard.org_vocab_start_index) & (ids < shard.org_vocab_end_index)
    rows = lm_head.quant_method.embedding(lm_head, torch.where(own, ids - shard.org_vocab_start_index, 0))
    return parallel_state.get_tp_group().all_reduce(rows.masked_fill_(~own[:, None], 0.0))


def draft_model_config(target: ModelConfig, model: str) -> ModelConfig:
    """The draft's ModelConfig. It inherits the settings that vLLM's own draft models inherit from the target.

    An MTP module is a part of the target's checkpoint.
    """
    own = OF_CHECKPOINT if kind_of_model(model) == MTP else ()
    return ModelConfig(
        **{name: getattr(target, name) for name in own},
        model=model,
        runner="draft",
        tokenizer=target.tokenizer,
        tokenizer_mode=target.tokenizer_mode,
        trust_remote_code=target.trust_remote_code,
        dtype=target.dtype,
        seed=target.seed,
        max_model_len=None,
        hf_overrides=partial(_as_in_vllm, target.max_model_len),
        spec_target_max_model_len=target.max_model_len,
        enforce_eager=target.enforce_eager,
        max_logprobs=target.max_logprobs,
        config_format=target.config_format,
        language_model_only=True,
    )


def kind_of_draft(vllm_config: VllmConfig, model: str) -> str:
    """The kind of a draft, by path or hub id.

    Start-up checks have downloaded the config.json of a hub id on their own node only. Other nodes do it here.
    """
    if local_folder(model) is not None:
        return kind_of_model(model)
    return kind_of_config(draft_model_config(vllm_config.model_config, model).hf_config.to_dict())


def _as_in_vllm(max_model_len: int, config: PretrainedConfig) -> PretrainedConfig:
    """A head's configuration as vLLM's own methods read it.

    A head shares the target's positions, although its config.json often names fewer. Some EAGLE-3 heads name the
    architecture of a language model, and MTP modules have that of their target.
    """
    kind = kind_of_config(config.to_dict())
    if kind == MTP:
        config = SpeculativeConfig.hf_config_override(config)
    if kind != LANGUAGE_MODEL:
        SpeculativeConfig._maybe_override_draft_max_position_embeddings(config, max_model_len)
    if kind == EAGLE3:
        config.update({"architectures": [n if "eagle3" in n.lower() else f"Eagle3{n}" for n in config.architectures]})
    if config.architectures == ["DSparkDraftModel"]:  # the name of another model class in vLLM
        config.update({"architectures": ["Qwen3DSparkModel"]})
    return config
