"""An EAGLE draft for the tiny target, fitted to its hidden states by least squares instead of trained."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
KEPT = (*SIZES, "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id")


class EagleHead(torch.nn.Module):
    """One float32 decoder layer that reads a token and the hidden state of the position before it."""

    def __init__(self, config: dict, target):
        super().__init__()
        own = LlamaConfig(**config, attn_implementation="sdpa")
        self.fc = torch.nn.Linear(2 * own.hidden_size, own.hidden_size, bias=False)
        layer = LlamaDecoderLayer(own, 0)
        layer.input_layernorm = torch.nn.Identity()  # EAGLE's first layer has none
        self.layers = torch.nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(own)
        self.embed, self.head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Predicted hidden states [batch, length, hidden] from tokens [batch, length] and the states before them."""
        hidden = self.fc(torch.cat((self.embed[tokens], before), dim=-1))
        turns = self.rotary(hidden, torch.arange(tokens.shape[1])[None])
        return self.layers[0](hidden, position_embeddings=turns)


@torch.no_grad()
def build_tiny_eagle(target: Path, folder: Path, vocab_size: int) -> Path:
    """Build the draft in ``folder``. Its layer is random, except for a least-squares fit of the next hidden state."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(5)
    prompts = torch.randint(3, vocab_size, (64, 8))
    texts = model.generate(prompts, max_new_tokens=56, do_sample=False, eos_token_id=None, pad_token_id=0)
    states = model.model(texts)[0]
    config = json.loads((target / "config.json").read_text())
    config = {name: config[name] for name in KEPT if config.get(name) is not None}
    config = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, **config}
    head = EagleHead(config, model)
    known = torch.cat((head.embed[texts][:, 1:-1], states[:, :-2]), -1).flatten(0, 1)
    head.fc.weight.copy_(torch.linalg.lstsq(known, states[:, 1:-1].flatten(0, 1)).solution.T)
    for module in (head.layers[0].self_attn.o_proj, head.layers[0].mlp.down_proj):
        torch.nn.init.normal_(module.weight, std=0.02)
    folder.mkdir()
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for file in target.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def load_exact(draft: Path, model) -> EagleHead:
    """Load the head in float32, as an engine runs it. ``model`` is the target."""
    head = EagleHead(json.loads((draft / "config.json").read_text()), model)
    head.load_state_dict({name: weight.float() for name, weight in load_file(draft / "model.safetensors").items()})
    return head


@torch.no_grad()
def chain_steps(head: EagleHead, model, text: list[int], first: int, length: int) -> tuple[int, int]:
    """Count target steps and accepted drafts for greedy chains of ``length`` drafts.

    Args:
        head: the draft.
        model: the target.
        text: the prompt and the target's greedy answer.
        first: length of the prompt.
        length: most drafts in a step.
    """
    features = pad(model.model(input_ids=torch.tensor([text]))[0][:, :-1], (0, 0, 1, 0))
    steps, accepted, known = 1, 0, first + 1  # the prompt's step emits one token
    while known < len(text):
        path = list(text[:known])
        before = features[:, :known]
        most = min(length, len(text) - known - 1)  # the bonus token needs no draft
        for _ in range(most):
            hidden = head(torch.tensor([path]), before)[:, -1:]
            path.append(int((hidden @ head.head.T).argmax()))
            before = torch.cat((before, hidden), 1)
        correct = 0
        while correct < most and path[known + correct] == text[known + correct]:
            correct += 1
        steps, accepted, known = steps + 1, accepted + correct, known + correct + 1
    return steps, accepted
