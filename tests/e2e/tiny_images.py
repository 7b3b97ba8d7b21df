"""Tiny random targets that read images, a text-only draft for each, and prompts with pictures.

The image processors need no torchvision; see ``without_torchvision``.
"""

import json

from tiny_pair import VOCAB_SIZE

# Special tokens after the words of the vocabulary. They mark or stand for images.
SPECIAL = ("<|image|>", "<|begin|>", "<|end|>", "<|video|>")
IMAGE, BEGIN, END, VIDEO = range(VOCAB_SIZE, VOCAB_SIZE + len(SPECIAL))
TEXT = {
    "vocab_size": VOCAB_SIZE + 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Arguments of engines that read images.
OPTIONS = {"limit_mm_per_prompt": {"image": 2, "video": 0}, "block_size": 32, "skip_tokenizer_init": False}
VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8, "initializer_range": 0.12}


def _qwen3_vl(folder):
    """M-RoPE; image features are also added to the first layers; the number of tokens depends on an image's size."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    vision = {"depth": 3, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 64}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**rope, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        vision_config={**VISION, **vision, "deepstack_visual_indexes": [0, 1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}).save_pretrained(folder)
    names = {"image_token": IMAGE, "vision_start_token": BEGIN, "vision_end_token": END, "video_token": VIDEO}
    draft = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, rope_parameters=rope))
    return transformers.Qwen3VLForConditionalGeneration(config), draft, "Qwen3VLProcessor", names


def _gemma3(folder):
    """Sliding windows in most layers; four tokens for every image."""
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    text = {**TEXT, "sliding_window": 64, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32},
        mm_tokens_per_image=4,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )
    Gemma3ImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    names = {"boi_token": BEGIN, "eoi_token": END, "image_token": IMAGE}
    draft = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**text))
    return transformers.Gemma3ForConditionalGeneration(config), draft, "Gemma3Processor", names


def _gemma4(folder):
    """Layers that share KV and have their own embeddings; up to 70 tokens for an image."""
    import transformers
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    layers = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "sliding_window": 64, "layer_types": layers, "num_kv_shared_layers": 2, "global_head_dim": 32}
    text |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": TEXT["vocab_size"]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    vision = {**VISION, **heads, "num_hidden_layers": 2, "position_embedding_size": 64, "default_output_length": 70}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": BEGIN, "eoi_token_id": END}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, tie_word_embeddings=False, **tokens
    )
    processors = {
        "image_processor": Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70),
        "feature_extractor": transformers.Gemma4AudioFeatureExtractor(),
    }
    stored = {name: json.loads(part.to_json_string()) for name, part in processors.items()}
    (folder / "processor_config.json").write_text(json.dumps(stored))
    names = {"boi_token": BEGIN, "eoi_token": END, "image_token": IMAGE}
    names |= dict.fromkeys(("audio_token", "boa_token", "eoa_token"), VIDEO)  # required by the processor
    draft = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**text))
    return transformers.Gemma4ForConditionalGeneration(config), draft, "Gemma4Processor", names


# How to build a family, and its placeholder for an image in a prompt, which vLLM replaces with the image's tokens.
FAMILIES = {"Qwen3-VL": (_qwen3_vl, [BEGIN, IMAGE, END]), "Gemma 3": (_gemma3, [BEGIN]), "Gemma 4": (_gemma4, [IMAGE])}


def build(folder, family):
    """Build the target, and a draft whose layers are the target's text layers with some noise."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    (folder / "target").mkdir()
    model, draft, processor, names = FAMILIES[family][0](folder / "target")
    model.float().eval().save_pretrained(folder / "target")
    if family == "Gemma 3":  # vLLM expects the vision tower's name in published checkpoints
        file = folder / "target" / "model.safetensors"
        tower, stored = "vision_tower.", load_file(file)
        renamed = {name.replace(tower, tower + "vision_model."): value for name, value in stored.items()}
        save_file(renamed, file, metadata={"format": "pt"})
    weights = model.model.language_model.state_dict()
    draft.model.load_state_dict({name: value.clone() for name, value in weights.items()})
    draft.lm_head.load_state_dict(model.lm_head.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() == 2:
                weight += 0.05 * weight.std() * torch.randn_like(weight)
    draft.float().save_pretrained(folder / "draft")
    _write_tokenizer(folder / "target", processor, names)
    return folder / "target", folder / "draft"


def _write_tokenizer(folder, processor, names) -> None:
    words = [f"w{index}" for index in range(VOCAB_SIZE)]
    words += [*SPECIAL, *("\n" * count for count in range(1, 5))]
    words += [f"w{index}" for index in range(len(words), TEXT["vocab_size"])]
    special = [
        {"id": VOCAB_SIZE + index, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, name in enumerate(SPECIAL)
    ]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w2"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": processor}
    config |= {"bos_token": "w0", "pad_token": "w1"}
    extra = {name: SPECIAL[token - VOCAB_SIZE] for name, token in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "extra_special_tokens": extra}))


def picture(seed: int):
    """A picture of random size and content."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    height, width = rng.choice([32, 48, 64], 2)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def with_pictures(family, text: list[int], seeds: list[int]) -> dict:
    """A prompt for vLLM: ``text`` with pictures at even distances."""
    length = len(text) // (len(seeds) + 1)
    tokens = [
        token for i in range(len(seeds)) for token in [*text[i * length : (i + 1) * length], *FAMILIES[family][1]]
    ]
    tokens += text[len(seeds) * length :]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": [picture(seed) for seed in seeds]}}


def without_torchvision() -> None:
    """Let vLLM import its multimodal models, and transformers create a video processor, without torchvision.

    vLLM imports transformers' image processors that need torchvision, but uses only one function, which does not. The
    engine uses another image processor. No test runs the video processor.
    """
    import importlib
    import sys
    from unittest.mock import MagicMock

    from transformers import processing_utils
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    missing = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    sys.modules.update({name: MagicMock() for name in missing})
    for module in ("qwen3_vl", "gemma3_mm", "gemma4_mm"):
        importlib.import_module(f"vllm.model_executor.models.{module}")
    for name in missing:
        del sys.modules[name]
    videos = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    processing_utils.MODALITY_TO_BASE_CLASS_MAPPING["video_processor"] = "BaseImageProcessor"
    AutoVideoProcessor.from_pretrained = lambda *_, **__: videos.Qwen3VLVideoProcessor()
