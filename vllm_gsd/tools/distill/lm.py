"""A student that is a narrow Llama. Its embedding is the target's, projected, so similar tokens start similar."""

from pathlib import Path
from typing import Self

import numpy as np
import torch
from speculators.losses.eager import kl_div_loss
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from vllm_gsd.config.draft_vocab import read_draft_vocab, write_draft_vocab
from vllm_gsd.tools.distill.options import HEAD_SIZE, NARROWEST, Options
from vllm_gsd.tools.distill.students import Drafted, Student, layers_that_stay
from vllm_gsd.tools.distill.target import Target


class LanguageModel(Student):
    """A language model whose LM head is trained on a trimmed vocabulary, ``listed`` most frequent first."""

    @classmethod
    def make(cls, options: Options, target: Target, ranking: np.ndarray) -> Self:
        """A new student, or the one of ``--init``. ``ranking``: all tokens, most frequent first."""
        if options.init is not None:
            model = AutoModelForCausalLM.from_pretrained(options.init, dtype=torch.float32)
            if options.layers is not None:
                layers = model.model.layers
                model.model.layers = nn.ModuleList(layers[i] for i in layers_that_stay(len(layers), options.layers))
                model.config.update({"num_hidden_layers": options.layers})
                if types := getattr(model.config, "layer_types", None):  # of Qwen's configurations
                    model.config.update({"layer_types": types[: options.layers]})
            stored = read_draft_vocab(Path(options.init))
            listed = range(model.config.vocab_size) if stored is None else stored["token_ids"]
            return cls(model, torch.tensor(listed), target)
        hidden = target.config["hidden_size"]
        width = options.value("width") or max(NARROWEST, hidden // 3 // 64 * 64)
        heads = width // HEAD_SIZE
        torch.manual_seed(options.seed)
        shape = {
            **target.layer_shape(),
            "num_hidden_layers": options.value("layers"),
            "hidden_size": width,
            "intermediate_size": -(-10 * width // 3 // 64) * 64,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 3 if heads % 3 == 0 else 1,
            "head_dim": HEAD_SIZE,
        }
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **shape))
        embedding = project(target.embedding, width)
        embedding *= model.config.initializer_range / embedding.std()
        model.get_input_embeddings().weight.data.copy_(embedding)
        return cls(model, torch.from_numpy(ranking[: options.value("vocab_size")]), target)

    def _logits(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, trimmed] of the rows, int64 [n], whose next token is known."""
        rows = batch["loss_mask"][0].nonzero()[:, 0]
        hidden = self.model.base_model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)[0]
        head = self.model.get_output_embeddings().weight[self.token_ids]
        return nn.functional.linear(hidden[0, rows], head), rows

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, rows = self._logits(batch)
        with torch.no_grad():
            wanted = self.target.logits(batch["verifier_last_hidden_states"][0, rows], self.token_ids)
        return {"loss": kl_div_loss(logits, wanted).mean()}

    def drafted(self, batch: dict[str, torch.Tensor]) -> Drafted:
        logits, rows = self._logits(batch)
        return Drafted(logits, rows, torch.arange(len(rows), device=rows.device)[:, None])

    def save(self, out: Path) -> None:
        super().save(out)
        write_draft_vocab(out, self.token_ids.cpu().numpy())


def project(embedding: torch.Tensor, width: int) -> torch.Tensor:
    """The embedding [vocabulary, hidden] projected onto its ``width`` main directions."""
    return embedding @ torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -width:]
