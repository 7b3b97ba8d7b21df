"""Students of the speculators package: DSpark blocks and EAGLE-3 heads.

Its trainer and its data loaders need a GPU. Its models run on a CPU, too: EAGLE-3 heads with their own forward pass and
loss and transformers' "sdpa" attention, blocks with those of ``blocks`` and ``loss``. None of them is compiled.
"""

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from speculators import SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel

from vllm_gsd.tools.distill import blocks
from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.least_squares import start_block
from vllm_gsd.tools.distill.loss import HeadLoss
from vllm_gsd.tools.distill.merge_layers import merge_layers
from vllm_gsd.tools.distill.options import EAGLE3_LAYERS, Options
from vllm_gsd.tools.distill.packs import Packs
from vllm_gsd.tools.distill.states import state_layers
from vllm_gsd.tools.distill.students import Drafted, Student
from vllm_gsd.tools.distill.target import Target

LOSS = resolve_loss_config("kl_div", "eager")
# What a block learns from: blocks at this share of an answer's places, and this many of the target's likeliest tokens.
# Row k counts with a chance of exp(-k / DECAY), because its guess matters only if those before it are right.
SHARE, LIKELIEST, DECAY = 0.6, 16, 3.0
# With a teacher: the weight of its loss, and the share of places in training. Fewer places make up for its time.
TEACHING, TAUGHT_SHARE = 4.0, 0.3
# Texts in a forward pass of blocks. More do not go faster, and attention keeps its weights for the backward pass.
PACK = 16


class SpeculatorsStudent(Student):
    """A student whose model is one of the speculators package."""

    model_class: type[Any]
    attention = "sdpa"  # the implementation that its layers use

    def __init__(self, model: Any, target: Target):
        full = torch.arange(target.config["vocab_size"])
        super().__init__(model.float(), full[model.t2d] if model.use_draft_vocab else full, target)
        self.scale = model.fc.weight.new_ones(model.fc.in_features)  # of the states that the model is trained on

    @classmethod
    def make(cls, options: Options, target: Target, ranking: np.ndarray) -> Self:
        """A new student, or the one of ``--init``. ``ranking``: all tokens, most frequent first."""
        vocab_size = target.config["vocab_size"]
        if options.init is not None:
            return cls(cls.loaded(options.init, target), target)
        size = min(options.value("vocab_size"), vocab_size)
        chosen = torch.from_numpy(np.sort(ranking[:size]))
        norms = target.embedding.norm(dim=1).cpu().numpy()[ranking]
        torch.manual_seed(options.seed)
        model = cls.model_class.from_training_args(
            **cls.shape(options, target, state_layers(target.config["num_hidden_layers"])),
            t2d=torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
            d2t=chosen - torch.arange(size),
            verifier_name_or_path=str(target.folder),
            draft_vocab_size=size,
            draft_attn_impl=cls.attention,
            # The rarest token stands for the unknown ones of a block. Some tokens that a target never learned have
            # embeddings of zeros, from which a block could ask for nothing.
            mask_token_id=int(ranking[norms > norms.mean() / 2][-1]),
        )
        return cls(model, target)

    @classmethod
    def loaded(cls, draft: str, target: Target) -> Any:
        """The model in a draft's folder."""
        config = SpeculatorModelConfig.from_pretrained(draft)
        config.speculators_config.verifier.name_or_path = str(target.folder)
        config.transformer_layer_config._attn_implementation = cls.attention
        return cls.model_class.from_pretrained(draft, config=config, dtype=torch.float32)

    @classmethod
    def shape(cls, options: Options, target: Target, layers: list[int]) -> dict[str, Any]:
        """The arguments of the model class that the kind and the options decide. ``layers``: those with states."""
        raise NotImplementedError

    def start(self, data: list[Answer], packs: Packs, new: bool) -> None:
        """See ``Student``. In training, the weights of ``fc`` are those for standardised states."""
        config = self.model.config
        if getattr(config, "fc_norm", False) or getattr(config, "norm_before_fc", False):
            return  # what a norm reads cannot be scaled by the weights behind it
        self.scale = packs.standardise(data)[: self.model.fc.in_features]
        if not new:
            self._rescale(1 / self.scale)

    def _rescale(self, factor: torch.Tensor) -> None:
        self.model.fc.weight.data *= factor

    def save(self, out: Path) -> None:
        """See ``Student``. The folder leaves out where the target is, which differs between machines."""
        self.model.config.speculators_config.verifier.name_or_path = None
        self._rescale(self.scale)
        super().save(out)
        # transformers adds the class's source, which vLLM does not need and would have to be trusted.
        (out / "config.py").unlink(missing_ok=True)
        config = json.loads((out / "config.json").read_text())
        config.pop("auto_map", None)
        (out / "config.json").write_text(json.dumps(config, indent=2))


class BlockStudent(SpeculatorsStudent):
    """A DSpark block: from the states before an anchor token it predicts the tokens after it, all at once.

    What it predicts at a depth depends on the token before, too, by a low-rank bias. In training that is the text's.
    """

    model_class = DSparkDraftModel
    attention = blocks.NAME

    def __init__(self, model: Any, target: Target, teacher: Any = None):
        super().__init__(model, target)
        # Another block. The student also learns what its LM head would read.
        self.teacher = teacher and teacher.requires_grad_(False).to(self.hardware.device)
        self.padding = self.depth = model.block_size
        # A block learns from a text so fast that the optimizer's time counts beside it.
        self.batch *= 2
        # Blocks see no other text, so a pack takes no more time than its texts alone.
        self.pack = min(PACK, self.batch)

    @classmethod
    def make(cls, options: Options, target: Target, ranking: np.ndarray) -> Self:
        """See ``SpeculatorsStudent``."""
        model = super().make(options, target, ranking).model
        depth, count = len(model.layers), options.layers
        if count not in (None, depth):
            weights, times = merge_layers(model.cpu().state_dict(), depth, count)
            layer = model.config.transformer_layer_config
            heads = {name: times * getattr(layer, name) for name in ("num_attention_heads", "num_key_value_heads")}
            layer.update({"num_hidden_layers": count, "layer_types": layer.layer_types[:count], **heads})
            model = cls.model_class.from_pretrained(None, config=model.config, state_dict=weights)
        return cls(model, target, options.teacher and cls.loaded(options.teacher, target))

    @classmethod
    def shape(cls, options: Options, target: Target, layers: list[int]) -> dict[str, Any]:
        from transformers import Qwen3Config

        layer = target.layer_shape()
        layer["intermediate_size"] = options.value("intermediate_size") or layer["intermediate_size"]
        return {
            "verifier_config": Qwen3Config(num_hidden_layers=options.value("layers"), **layer),
            "target_layer_ids": layers,
            "block_size": options.value("depth"),
            "markov_rank": min(options.value("rank"), options.value("vocab_size"), target.config["hidden_size"]),
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }

    def start(self, data: list[Answer], packs: Packs, new: bool) -> None:
        super().start(data, packs, new)
        if self.teacher is not None:
            self.teacher.fc.weight.data /= self.scale
        if new:
            start_block(self.model, self.target, data, packs)

    @property
    def _heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the LM head, [drafted tokens, hidden], and of the bias, [drafted tokens, rank]."""
        return self.model.lm_head.weight, self.model.markov_head.markov_w2.weight

    def _drafts(self, batch: dict[str, torch.Tensor], share: float) -> tuple[blocks.Blocks, torch.Tensor, torch.Tensor]:
        """Blocks, their hidden states, and with the tokens before what ``_heads`` read, [m, size, hidden + rank]."""
        found = blocks.chosen_blocks(batch["loss_mask"][0], batch["document_ids"][0], self.depth, share)
        hidden = blocks.hidden_states(self.model, batch, found)
        before = self.model.markov_head.prev_embeddings(batch["input_ids"][0, found.rows])
        return found, hidden, torch.cat([hidden, before], 2).to(self.hardware.dtype)

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        found, hidden, read = self._drafts(batch, SHARE if self.teacher is None else TAUGHT_SHARE)
        known, rows = batch["loss_mask"][0], found.rows
        weights = torch.exp(-torch.arange(self.depth, device=rows.device) / DECAY)
        with torch.no_grad():
            last = batch["verifier_last_hidden_states"][0, known]
            ids, chances = self.target.likeliest(last, self.token_ids, LIKELIEST)
            chosen = known[rows] & (torch.rand(rows.shape, device=rows.device) < weights)
            place = known.cumsum(0)[rows[chosen]] - 1  # of each row's position among the known
        loss = HeadLoss.apply(read[chosen], *self._heads, ids[place], chances[place]) / len(place)
        if self.teacher is not None:
            with torch.no_grad():
                wanted = blocks.hidden_states(self.teacher, batch, found)
            error, size = (weights @ rows.square().sum((0, 2)) for rows in (hidden - wanted, wanted))
            loss = loss + TEACHING * error / size
        return {"loss": loss}

    def drafted(self, batch: dict[str, torch.Tensor]) -> Drafted:
        (_, rows, *_), _, read = self._drafts(batch, SHARE)
        logits = read.flatten(0, 1) @ torch.cat(self._heads, 1).to(read.dtype).T
        chains = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
        return Drafted(logits, rows.flatten(), chains[batch["loss_mask"][0, rows].all(1)])


class Eagle3Student(SpeculatorsStudent):
    """An EAGLE-3 head: one layer that reads a token and the states before it, and later its own output instead."""

    model_class = Eagle3DraftModel
    shift = True

    def __init__(self, model: Any, target: Target):
        super().__init__(model, target)
        # The tokens that it is trained to predict one after another. The model shifts a batch by up to as many.
        self.padding = self.depth = model.config.speculators_config.proposal_methods[0].speculative_tokens

    @classmethod
    def shape(cls, options: Options, target: Target, layers: list[int]) -> dict[str, Any]:
        from transformers import LlamaConfig

        return {
            "verifier_config": LlamaConfig(num_hidden_layers=1, **target.layer_shape()),
            "target_layer_ids": layers[:EAGLE3_LAYERS],
            "ttt_steps": options.value("depth"),
            "norm_before_residual": True,
        }

    def _of_own_layers(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**batch, "hidden_states": batch["hidden_states"][..., : self.model.fc.in_features]}

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        _, loss, _ = self.model(**self._of_own_layers(batch), loss_config=LOSS, ttt_steps=self.depth)
        return {"loss": loss}

    def drafted(self, batch: dict[str, torch.Tensor]) -> Drafted:
        logits: list[torch.Tensor] = []
        inputs = {name: rows for name, rows in self._of_own_layers(batch).items() if "verifier" not in name}
        with self.model.lm_head.register_forward_hook(lambda head, args, output: logits.append(output[0])):
            self.model(**inputs, ttt_steps=self.depth)
        known, count = batch["loss_mask"][0], batch["input_ids"].shape[1]
        step, place = torch.arange(self.depth)[:, None], torch.arange(count)
        rows = (place + step).clamp(max=count - 1).flatten()
        chains = (count * step + place).T[: count - self.depth + 1]
        whole = known.unfold(0, self.depth, 1).all(1)
        return Drafted(torch.cat(logits), rows, chains[whole.cpu()].to(known.device))
