"""Drafting with a draft whose next token depends on the token before, and on a hidden state if it reads some.

Or with one of whole blocks, whose tokens depend on their positions.
"""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.config.draft_kind import LANGUAGE_MODEL
from vllm_gsd.engine.draft.block_drafter import BlockDrafter
from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.draft.level_drafter import LevelDrafter
from vllm_gsd.engine.draft.limits import draft_kv_slots
from vllm_gsd.engine.draft.model import DraftModel
from vllm_gsd.engine.v2.device_drafting import DeviceDrafting, KnownBatch
from vllm_gsd.engine.v2.proposals import empty_trees
from vllm_gsd.method.constants import NUM_SOURCES
from vllm_gsd.planner.calibration import Calibration

CPU = torch.device("cpu")
VOCAB, LENGTH, BLOCK_SIZE, SLOTS, NODES = 40, 64, 16, 5, 6
TOKENS, STATES, BLOCKS = "tokens", "states", "blocks"  # what a draft reads, or drafts


def toy_model(draft: str = TOKENS) -> DraftModel:
    """Rows see their own token, and what they read of the row or the text before; those of blocks, their position."""
    generator = torch.Generator().manual_seed(0)
    weight = 3 * torch.randn((VOCAB, VOCAB), generator=generator)
    model = DraftModel.__new__(DraftModel)
    model.head = None
    model.reads_features = draft == STATES
    model.target_ids = None
    model.kind = "dspark" if draft == BLOCKS else LANGUAGE_MODEL
    model.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB, get_hidden_size=lambda: VOCAB)

    def run_rows(tokens, slots, tree, features=None):
        seen = tokens.long() + (tree.positions if draft == BLOCKS else 0)
        own = torch.nn.functional.one_hot(seen % VOCAB, VOCAB).float()
        return own if features is None else own + features / 2

    model.run_rows = run_rows
    model.model = SimpleNamespace(compute_logits=lambda hidden: hidden @ weight)
    if draft == BLOCKS:
        model.model = toy_block_heads(weight)
    return model


def toy_block_heads(weight: torch.Tensor) -> SimpleNamespace:
    """The interface of vLLM's ``Qwen3DSparkForCausalLM``; the token before adds another token's row of the weight."""
    return SimpleNamespace(
        config=SimpleNamespace(dspark_draft_topk=None),
        model=SimpleNamespace(confidence_head=True),
        compute_draft_logits=lambda hidden: hidden @ weight,
        markov_embed=lambda tokens: weight[(3 * tokens + 1) % VOCAB],
        markov_bias=lambda embedded: embedded / 2,
        compute_confidence=lambda hidden, embedded: torch.sigmoid(2 + embedded[:, 0]),
        map_draft_to_target=lambda ids: ids,
    )


def toy_drafter(config: GSDConfig, draft: str):
    """As much of a drafter as the draft phase takes."""
    features = Features(SLOTS * LENGTH, VOCAB, torch.float32, CPU) if draft == STATES else None
    drafter = LevelDrafter.__new__(LevelDrafter)
    drafter.max_slots = draft_kv_slots(config)
    if draft == BLOCKS:
        drafter = BlockDrafter.__new__(BlockDrafter)
        drafter.config, drafter.mask_token, drafter.causal, drafter.max_slots = config, 2, False, 0
        drafter.predicting, drafter.num_rows = slice(1, None), 1 + config.max_depth
    drafter.model, drafter.features, drafter.max_positions, drafter.max_rows = toy_model(draft), features, LENGTH, 1000
    drafter.stats = SimpleNamespace(counts={"draft_rows": 0, "draft_forwards": 0})
    return drafter


def toy_drafting(seed: int = 1, draft: str = TOKENS, max_depth: int = 3):
    """Requests with random texts."""
    config = GSDConfig(method="gsd", model="draft", num_speculative_tokens=NODES, max_depth=max_depth, top_k=3)
    drafter = toy_drafter(config, draft)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=torch.zeros((SLOTS, LENGTH), dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32)),
    )
    drafting = DeviceDrafting(config, drafter, states, 60, empty_trees(SLOTS, NODES, CPU), CPU)
    drafting.bind(torch.zeros((SLOTS, LENGTH // BLOCK_SIZE), dtype=torch.int32), BLOCK_SIZE)
    refill(drafting, seed)
    return drafting


def refill(drafting: DeviceDrafting, seed: int) -> None:
    """Other texts and hidden states, and no draft KV."""
    generator = torch.Generator().manual_seed(seed)
    texts = drafting.req_states.all_token_ids.gpu
    texts.copy_(torch.randint(0, 8, texts.shape, generator=generator))
    lengths = drafting.req_states.total_len.gpu
    lengths.copy_(torch.randint(5, 40, lengths.shape, generator=generator))
    if drafting.drafter.features is not None:
        states = drafting.drafter.features.states
        states.copy_(torch.rand(states.shape, generator=generator))
    drafting.reset()


def known_batch(drafting: DeviceDrafting, slots: np.ndarray) -> KnownBatch:
    """What the host knows about requests in some slots; one of four is not drafted for, and one is near its end."""
    lengths = drafting.req_states.total_len.gpu.numpy()[slots].astype(np.int64)
    count = len(slots)
    return KnownBatch(
        slots=slots,
        wanted=slots % 4 != 3,
        draft_length=lengths - 1 - slots % 3,
        capacity=np.full(count, LENGTH),
        end=np.where(slots % 5 == 2, lengths + 3, LENGTH),
        trust=np.linspace(0.5, 1.5, count * NUM_SOURCES, dtype=np.float32).reshape(count, NUM_SOURCES),
        factor=Calibration().factor,
    )


def block_tables(count: int) -> torch.Tensor:
    """Blocks of ``count`` requests."""
    blocks = torch.arange(count * (LENGTH // BLOCK_SIZE), dtype=torch.int32)
    return blocks.view(count, -1)


def propose(drafting: DeviceDrafting, slots=None, levels: int | None = None) -> list[torch.Tensor]:
    """The trees of all slots after drafting for some, so many levels or all."""
    slots = np.arange(len(drafting.trees.token)) if slots is None else np.asarray(slots)
    for of in drafting.trees:
        of.zero_()
    drafting.propose(known_batch(drafting, slots), block_tables(len(slots)), levels)
    return [of.clone() for of in drafting.trees] + [drafting.draft_length.clone(), drafting.counts.clone()]
