"""Folders of EAGLE-3 heads, as published and in the speculators format: good ones pass, damaged ones are refused."""

import json

import numpy as np
import pytest
import torch
from damaged_folders import TARGET, VOCAB, cut_off, keys, refusal, tensors, write_target
from eagle3_files import LAYERS, layer_config, random_head, write_midlayer, write_speculators
from safetensors.torch import load_file, save_file

from vllm_gsd.config import GSDConfigError
from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.config.draft_kind import kind_of
from vllm_gsd.config.draft_vocab import write_draft_vocab

FLAGS = {"llama": {}, "qwen3": {"fc_norm": True, "norm_output": True}, "before fc": {"norm_before_fc": True}}
HUB_TARGET = "org/Big-8B-Instruct-FP8"


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


@pytest.fixture
def head(tmp_path, target):
    layer = layer_config(TARGET, "llama")
    write_speculators(tmp_path / "head", random_head(layer, {}, 64), layer, {}, target)
    return tmp_path / "head"


@pytest.mark.parametrize("name", FLAGS)
def test_whole_heads(tmp_path, target, name):
    layer = layer_config(TARGET, "qwen3" if name == "qwen3" else "llama")
    write_speculators(tmp_path / "one", random_head(layer, FLAGS[name], 64), layer, FLAGS[name], target)
    write_midlayer(tmp_path / "other", random_head(layer, FLAGS[name], VOCAB), layer, FLAGS[name], target)
    for folder in (tmp_path / "one", tmp_path / "other"):
        assert kind_of(folder) == "eagle3"
        check_draft(str(folder), VOCAB, target)


@pytest.mark.parametrize("name", FLAGS)
def test_tensors_are_those_of_the_package(tmp_path, name):
    pytest.importorskip("speculators", reason="speculators, which the set-up installs, is not installed")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig, Qwen3Config

    layer = layer_config(TARGET, "qwen3" if name == "qwen3" else "llama")
    shape = (Qwen3Config if name == "qwen3" else LlamaConfig)(**layer, attn_implementation="eager")
    options = {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": LAYERS, **FLAGS[name]}
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=shape, **options))
    model.save_pretrained(tmp_path)
    theirs, ours = load_file(tmp_path / "model.safetensors"), random_head(layer, FLAGS[name], 64)
    described = [{key: (value.shape, value.dtype) for key, value in one.items()} for one in (theirs, ours)]
    assert described[0] == described[1]
    written = json.loads((tmp_path / "config.json").read_text())
    write_speculators(tmp_path / "ours", ours, layer, FLAGS[name], "target")
    assert json.loads((tmp_path / "ours" / "config.json").read_text()).keys() <= written.keys()


NAME = "speculators_config__verifier__name_or_path"
DAMAGE = {
    "unknown kind": (keys(speculators_model_type="oracle"), ["oracle", "kind"]),
    "kind that does not fit": (
        keys(speculators_model_type="peagle", speculators_config__algorithm="peagle"),
        ["peagle"],
    ),
    "two kinds": (keys(speculators_config__algorithm="dspark"), ["eagle3", "dspark", "algorithm"]),
    "no kind": (keys(speculators_model_type=None), ["kind"]),
    "later version": (keys(speculators_version="0.10.0"), ["0.10.0", "0.9"]),
    "no version": (keys(speculators_version=None), ["speculators_version"]),
    "no layer": (keys(transformer_layer_config=None), ["transformer_layer_config"]),
    "no attention heads": (
        keys(transformer_layer_config__num_attention_heads=0, transformer_layer_config__head_dim=None),
        ["num_attention_heads is missing or malformed"],
    ),
    "no verifier": (keys(speculators_config__verifier=None), ["verifier"]),
    "verifier's architecture": (
        keys(speculators_config__verifier__architectures=["Qwen3ForCausalLM"]),
        ["Qwen3ForCausalLM", "LlamaForCausalLM"],
    ),
    "architecture that is no name": (
        keys(speculators_config__verifier__architectures=[{"name": "Qwen3"}]),
        ["Qwen3", "LlamaForCausalLM"],
    ),
    "verifier's name": (keys(**{NAME: "org/Small-1B"}), ["org/Small-1B", HUB_TARGET]),
    "hidden size": (keys(target_hidden_size=64), ["64", "32", "hidden states"]),
    "vocabulary": (keys(transformer_layer_config__vocab_size=100), ["100", "96", "vocabulary"]),
    "draft vocabulary": (keys(draft_vocab_size=4000), ["4000", "draft_vocab_size"]),
    "layers beyond the target's": (keys(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), ["[1, 3, 5]", "4"]),
    "the same layer twice": (keys(eagle_aux_hidden_state_layer_ids=[1, 1, 2]), ["[1, 1, 2]", "different"]),
    "layer of another type": (keys(transformer_layer_config__model_type="mamba"), ["mamba", "llama"]),
    "lacking key": (keys(transformer_layer_config__intermediate_size=None), ["intermediate_size"]),
    "lacking tensor": (tensors(**{"fc.weight": None}), ["fc.weight"]),
    "lacking mapping": (tensors(d2t=None), ["d2t"]),
    "shape of a tensor": (tensors(**{"fc.weight": torch.zeros(32, 64)}), ["fc.weight", "[32, 64]", "[32, 96]"]),
    "mapping beyond the vocabulary": (tensors(d2t=torch.full((64,), 60)), ["d2t", "96"]),
    "mapping to one token twice": (tensors(d2t=-torch.arange(64)), ["d2t", "twice"]),
    "weights cut off": (cut_off, ["cut off"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folders_are_refused(head, target, case, monkeypatch):
    damage, parts = DAMAGE[case]
    damage(head)
    name = str(target)
    if case == "verifier's name":  # only hub ids are compared
        name = HUB_TARGET
        monkeypatch.setattr("vllm_gsd.config.draft_check.local_folder", lambda name: head if "/head" in name else None)
    message = refusal(head, name)
    assert all(part in message for part in parts), message


def test_a_relative_folder_is_no_hub_id(head, target, monkeypatch):
    """Only hub ids have to name the verifier."""
    keys(**{NAME: "some/other"})(head)
    monkeypatch.chdir(target.parent.parent)
    check_draft(str(head), VOCAB, f"{target.parent.name}/{target.name}")


def test_a_folder_that_is_still_downloaded_is_no_damaged_one(head, target):
    """vLLM fetches what is missing."""
    whole = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    files = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    place = {name: files[name == "fc.weight"] for name in whole}
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    save_file({name: tensor for name, tensor in whole.items() if name != "fc.weight"}, head / files[0])
    check_draft(str(head), VOCAB, str(target))
    save_file({}, head / files[1])
    assert "fc.weight" in refusal(head, str(target))
    save_file({"fc.weight": whole["fc.weight"]}, head / files[1])
    check_draft(str(head), VOCAB, str(target))


def test_a_copy_of_the_verifier_by_its_name(head, monkeypatch):
    keys(**{NAME: "somebody/big-8b-instruct"})(head)
    monkeypatch.setattr("vllm_gsd.config.draft_check.local_folder", lambda name: head if "/head" in name else None)
    check_draft(str(head), VOCAB, HUB_TARGET)


def test_an_mtp_module_drafts_for_its_target_only(target, tmp_path):
    keys = {**TARGET, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    for folder in (target, other := tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(keys))
    check_draft(str(target), VOCAB, target)
    with pytest.raises(GSDConfigError, match="draft_vocab_size"):
        check_draft(str(target), VOCAB, target, draft_vocab_size=40)
    with pytest.raises(GSDConfigError, match="its own model only"):
        check_draft(str(other), VOCAB, target)
    write_draft_vocab(target, np.arange(40))
    with pytest.raises(GSDConfigError, match=r"has a draft_vocab\.json"):
        check_draft(str(target), VOCAB, target)


@pytest.mark.parametrize(
    ("architecture", "module"),
    {
        "MiMoForCausalLM": "mtp_layers.0.input_proj", "Ernie4_5_MoeForCausalLM": "mtp_linear_proj.0",
        "Glm4MoeForCausalLM": f"layers.{TARGET['num_hidden_layers']}.eh_proj",
    }.items(),
)  # fmt: skip
def test_copies_without_their_mtp_module(target, architecture, module):
    """vLLM would leave the module's weights uninitialised if the copy is quantised."""
    config = {**TARGET, "architectures": [architecture], "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    rest = {"model.layers.0.mlp.up_proj.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(1)}
    save_file(rest, target / "model.safetensors")
    with pytest.raises(GSDConfigError, match="lacks the tensors of the MTP module"):
        check_draft(str(target), VOCAB, target)
    save_file({**rest, f"model.{module}.weight": torch.zeros(1)}, target / "model.safetensors")
    check_draft(str(target), VOCAB, target)
    # Of a download that was interrupted, only the index knows all names.
    (target / "model.safetensors").unlink()
    save_file(rest, target / "model-00001-of-00002.safetensors")
    check_draft(str(target), VOCAB, target)
    index = {"weight_map": dict.fromkeys(rest, "model-00001-of-00002.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(GSDConfigError, match="lacks the tensors of the MTP module"):
        check_draft(str(target), VOCAB, target)


def test_a_trimmed_head_needs_all_tokens(head, target):
    with pytest.raises(GSDConfigError, match="draft_vocab_size"):
        check_draft(str(head), VOCAB, target, draft_vocab_size=40)
    write_draft_vocab(head, np.arange(40))
    with pytest.raises(GSDConfigError, match=r"of its own, but also a draft_vocab\.json"):
        check_draft(str(head), VOCAB, target)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    {
        "LlamaForCausalLM": "language model", "EagleLlamaForCausalLM": "eagle", "Eagle3Qwen3ForCausalLM": "eagle3",
        "LlamaForCausalLMEagle3": "eagle3", "PEagleDraftModel": "peagle", "MiMoMTPModel": "mtp",
        "DFlash2DraftModel": "dflash2", "DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark",
    }.items(),
)  # fmt: skip
def test_kinds_by_architecture(tmp_path, architecture, kind):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert kind_of(tmp_path) == kind


@pytest.mark.parametrize("config", ["7", "[]", "{", '{"architectures": 7}'])
def test_a_damaged_config_counts_as_a_language_model(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    assert kind_of(tmp_path) == "language model"


def test_heads_that_name_a_language_model(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}')
    assert kind_of(tmp_path) == "eagle3"


@pytest.mark.parametrize("architecture", ["PEagleDraftModel", "MiMoMTPModel"])
def test_kinds_that_gsd_cannot_run(tmp_path, target, architecture):
    (tmp_path / "config.json").write_text(json.dumps({**TARGET, "architectures": [architecture]}))
    with pytest.raises(GSDConfigError, match="of the kind"):
        check_draft(str(tmp_path), VOCAB, target)


def test_mtp_modules_of_the_target(target):
    (target / "config.json").write_text(json.dumps({**TARGET, "num_nextn_predict_layers": 1}))
    with pytest.raises(GSDConfigError, match="MTP modules"):
        check_draft(str(target), VOCAB, target)
