"""Folders of block drafts (DFlash, DFlash2, DSpark): good ones pass, damaged ones are refused with one sentence."""

import json

import numpy as np
import pytest
import torch
from damaged_folders import cut_off, keys, refusal, tensors, write_target
from safetensors.torch import load_file, save_file

from vllm_gsd.config import GSDConfig
from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.config.draft_vocab import write_draft_vocab
from vllm_gsd.tools.check.model_files import DTYPE_BYTES
from vllm_gsd.tools.check.pair import check_pair

SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "model_type": "qwen3"}
OWN = {"mask_token_id": 3, "target_layer_ids": [0, 2, 3]}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
GEMMA4 = {"model_type": "gemma4_text", "layer_types": ["full_attention"], "attention_k_eq_v": True}
GEMMA4 |= {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
CONFIGS = {
    "dspark": {**SHAPE, **OWN, "architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "draft_vocab_size": 64},
    "dflash": {**SHAPE, "architectures": ["DFlashDraftModel"], "dflash_config": OWN},
    "dflash2": {**SHAPE, "architectures": ["DFlash2DraftModel"], "dflash_config": {**OWN, **SELECTOR}},
    "gemma4": {**SHAPE, **OWN, "architectures": ["Gemma4DSparkModel"], "markov_rank": 4, **GEMMA4},
}


def whole_weights(kind):
    shapes = {"fc": (32, 96), "hidden_norm": (32,), "norm": (32,)}
    attention = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    attention |= {"q_norm": (16,), "k_norm": (16,)}
    shapes |= {f"layers.0.self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"layers.0.mlp.{name}_proj": (48, 32) for name in ("gate", "up")}
    shapes |= {"layers.0.mlp.down_proj": (32, 48)}
    shapes |= {f"layers.0.{name}_layernorm": (32,) for name in ("input", "post_attention")}
    if kind == "dspark":
        shapes |= {"markov_head.markov_w1": (96, 4), "markov_head.markov_w2": (64, 4), "lm_head": (64, 32)}
    if kind == "gemma4":
        del shapes["layers.0.self_attn.v_proj"]
        shapes |= {f"layers.0.{name}_feedforward_layernorm": (32,) for name in ("pre", "post")}
        shapes |= {"markov_head.markov_w1": (96, 4), "markov_head.markov_w2": (96, 4)}
        shapes |= {"embed_tokens": (96, 32), "lm_head": (96, 32)}
    if kind == "dflash2":
        shapes |= {"candidate_selector.hidden_projection": (4, 32)}
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    if kind == "dspark":
        weights["d2t"] = torch.arange(64) // 2
    if kind == "dflash2":
        for name in ("predecessor", "successor"):
            weights[f"candidate_selector.{name}_codebook"] = torch.zeros(96, 4)
        for name in ("attention_conv", "mlp_conv"):
            weights[f"layers.0.{name}.base_kernel"] = torch.zeros(2, 2, 32)
    return weights


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def write(tmp_path):
    def write(kind):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
        save_file(whole_weights(kind), folder / "model.safetensors")
        return folder

    return write


@pytest.mark.parametrize("kind", CONFIGS)
def test_whole_folders(write, target, kind):
    check_draft(str(write(kind)), 96, target)


def test_memory(write, target):
    """Nothing is kept of the target's hidden states: its steps write the draft's keys and values."""
    findings, memory = check_pair(target, GSDConfig.load({"method": "gsd", "model": str(write("dspark"))}))
    assert memory["kv_bytes_per_token"] == 2 * 16 * DTYPE_BYTES[memory["dtype"]]
    assert memory["feature_bytes_per_token"] == 0
    assert "features of the draft" not in {finding.topic for finding in findings}


DAMAGE = {
    "another model's shape": ("dspark", keys(model_type="deepseek_v4"), ["Qwen3-shaped", "Qwen3DSparkModel"]),
    "deepseek": ("dspark", keys(architectures=["DSparkDraftModel"], model_type="deepseek_v4"), ["MLA"]),
    "gemma": ("dspark", keys(architectures=["Gemma4DSparkModel"]), ["Gemma4DSparkModel", "Qwen3-shaped"]),
    "gemma's windows": ("gemma4", keys(layer_types=["sliding_attention"]), ["Gemma 4", "full attention"]),
    "gemma's values": ("gemma4", keys(attention_k_eq_v=False), ["Gemma 4", "attention_k_eq_v"]),
    "gemma trimmed": ("gemma4", keys(draft_vocab_size=64), ["64", "whole vocabulary"]),
    "gemma without an end": ("gemma4", tensors(**{"lm_head.weight": None}), ["lm_head.weight"]),
    "laguna": (
        "dflash",
        keys(architectures=["DFlashLagunaForCausalLM"], model_type="laguna"),
        ["DFlashLagunaForCausalLM", "normalise the context"],
    ),
    "another class": ("dflash", keys(architectures=["MuseGlimmerAssistantModel"]), ["MuseGlimmerAssistantModel"]),
    "windows of no size": ("dflash", keys(layer_types=["sliding_attention"]), ["sliding windows", "sliding_window"]),
    "some windows": ("dflash", keys(layer_types=["sliding_attention", "full_attention"]), ["some", "sliding windows"]),
    "mapping": ("dspark", tensors(d2t=-torch.arange(64)), ["d2t", "twice"]),
    "no mask token": ("dspark", keys(mask_token_id=None), ["mask_token_id"]),
    "anchor": ("dflash", keys(sample_from_anchor=True), ["sample_from_anchor", "dspark"]),
    "Markov head": ("dspark", keys(markov_head_type="rnn"), ["rnn", "vanilla"]),
    "trimmed": ("dflash2", keys(draft_vocab_size=64), ["64", "whole vocabulary"]),
    "vocabulary": ("dflash", keys(vocab_size=100), ["100", "96"]),
    "hidden size": ("dspark", keys(target_hidden_size=64), ["64", "32"]),
    "layers": ("dspark", keys(target_layer_ids=[0, 2, 7]), ["[1, 3, 8]", "4"]),
    "no layers": ("dspark", keys(target_layer_ids=None), ["target_layer_ids"]),
    "lacking key": ("dflash2", keys(dflash_config=OWN), ["conv_kernel_size"]),
    "lacking head": ("dspark", tensors(**{"markov_head.markov_w2.weight": None}), ["markov_w2"]),
    "lacking LM head": ("dspark", tensors(**{"lm_head.weight": None}), ["lm_head.weight"]),
    "lacking layer": ("dflash", keys(num_hidden_layers=2), ["layers.1.self_attn.q_proj.weight"]),
    "shape": ("dspark", keys(markov_rank=8), ["markov_w1", "[96, 4]", "[96, 8]"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folders_are_refused(write, target, case):
    kind, damage, parts = DAMAGE[case]
    folder = write(kind)
    damage(folder)
    message = refusal(folder, target)
    assert all(part in message for part in parts), message


def any_block(kind):
    """Ten kinds of damage that apply to any block draft, each with a part of the message."""
    prefix = "dflash_config__" if "dflash_config" in CONFIGS[kind] else ""
    return [
        (keys(architectures=["Oracle" + CONFIGS[kind]["architectures"][0]]), "Oracle"),
        (keys(**{f"{prefix}mask_token_id": None}), "mask_token_id"),
        (keys(vocab_size=100), "100"),
        (keys(target_hidden_size=64), "64"),
        (keys(**{f"{prefix}target_layer_ids": [0, 2, 7]}), "[1, 3, 8]"),
        (keys(**{f"{prefix}target_layer_ids": None}), "target_layer_ids"),
        (keys(num_hidden_layers=2), "layers.1."),
        (tensors(**{"fc.weight": None}), "fc.weight"),
        (tensors(**{"norm.weight": torch.zeros(33)}), "[33]"),
        (cut_off, "cut off"),
    ]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("case", range(10))
def test_every_kind_is_checked(write, target, kind, case):
    damage, part = any_block(kind)[case]
    folder = write(kind)
    damage(folder)
    assert part in refusal(folder, target)


def test_blocks_are_never_trimmed(write, target):
    folder = write("dflash")
    message = refusal(folder, target, draft_vocab_size=40)
    assert '"draft_vocab_size" must be left out, not 40' in message
    write_draft_vocab(folder, np.arange(40))
    assert "cannot be trimmed, but has a draft_vocab.json" in refusal(folder, target)


def test_a_draft_with_windows(write, target):
    folder = write("dflash")
    keys(layer_types=["sliding_attention"], use_sliding_window=True, sliding_window=64)(folder)
    check_draft(str(folder), 96, target)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gemma4"])
def test_folders_of_the_package(tmp_path, target, kind):
    """Drafts written by the package speculators pass and have the tensors that the check expects."""
    pytest.importorskip("speculators", reason="speculators, which the set-up installs, is not installed")
    from importlib import import_module

    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    name = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2"}[kind]
    of_kind = import_module(f"speculators.models.{kind}")
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    config = getattr(of_kind, f"{name}SpeculatorConfig")(
        transformer_layer_config=Qwen3Config(**SHAPE, attn_implementation="eager"),
        draft_vocab_size=96 if kind == "dflash2" else 64,
        block_size=4,
        aux_hidden_state_layer_ids=[1, 3, 4],
        mask_token_id=3,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"]),
        ),
        **{"dspark": {"markov_rank": 4}, "dflash2": {**SELECTOR}}.get(kind, {}),
    )
    getattr(of_kind, f"{name}DraftModel")(config).save_pretrained(tmp_path / "draft")
    check_draft(str(tmp_path / "draft"), 96, target)
    stored = load_file(tmp_path / "draft" / "model.safetensors").keys()
    assert whole_weights(kind).keys() <= stored
    more = "d2t", "t2d", "embed_tokens", "lm_head", "confidence_head", "kernel_projection"
    assert all(any(part in name for part in more) for name in stored - whole_weights(kind).keys())
