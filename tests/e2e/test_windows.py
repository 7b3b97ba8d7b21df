"""Layers with sliding windows, capped scores or attention sinks: tokens with graphs equal plain vLLM's."""

import contextlib
import json

import pytest
import torch
from engine_process import Engine, draft_every_level, model_runner, run
from rounding import assert_close, generates
from tiny_windows import FAMILIES, NODES, SHAPE, WINDOW, build


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request, tmp_path_factory):
    """Engines: plain vLLM, gsd with a draft model, and gsd with only copies from the text."""
    target, draft = build(tmp_path_factory.mktemp("windowed"), *FAMILIES[request.param])
    configs = [
        None,
        {"method": "gsd", "model": str(draft), "num_speculative_tokens": NODES},
        {"method": "gsd", "model": None},
    ]
    with contextlib.ExitStack() as stack:
        started = [
            Engine(target, config, [draft_every_level] if config else [], skip_tokenizer_init=True)
            for config in configs
        ]
        for engine in started:
            stack.callback(engine.close)
        yield request.param, started


def answers(engine, prompts, batch):
    """Greedy and seeded tokens for every prompt, ``batch`` prompts at a time."""
    parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    sampling = [{"temperature": 0, "max_tokens": 60}, {"temperature": 0.8, "seed": 5, "max_tokens": 60}]
    return [answer.tokens for params in sampling for part in parts for answer in engine.generate(part, params)]


def forget(_llm, option):
    """Make attention along graphs ignore the sliding window or the sinks, an argument of ``tree_attention``."""
    from vllm_gsd.engine.attention import cpu as cpu_attention

    attend = cpu_attention.tree_attention
    disabled = {"sliding_window": -1, "sinks": None}[option]
    cpu_attention.tree_attention = lambda *args, **kwargs: attend(*args, **{**kwargs, option: disabled})


def test_equals_plain_vllm(engines, random_prompts):
    prompts = [prompt + prompt[-20:] for prompt in random_prompts(6, 30, 150)]
    family, (plain, drafted, copied) = engines
    for some, batch in ((prompts[1:3], 1), (prompts, 4)):
        expected = answers(plain, some, batch)
        for engine in (drafted, copied):
            before = engine.metrics()["spec_decode_num_accepted_tokens"]
            assert answers(engine, some, batch) == expected
            assert engine.metrics()["spec_decode_num_accepted_tokens"] > before
    counts = drafted.metrics()
    assert counts["gsd_nodes_accepted_native"] > counts["gsd_target_steps"] / 5
    assert counts["gsd_kv_rows_moved"] > 0
    drafted.call(forget, "sinks" if "sinks" in family else "sliding_window")
    assert answers(drafted, prompts, 4) != expected  # otherwise, equal answers would prove nothing


def test_bfloat16(tmp_path, random_prompts):
    """In bfloat16, our kernel attends chains, rows without a graph and prompts of models without windows."""
    target, draft = build(tmp_path, *FAMILIES["every other layer, capped"])
    params = {"temperature": 0, "max_tokens": 40, "logprobs": 2, "ignore_eos": True}
    prompts, options = random_prompts(6, 30, 150), {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with contextlib.closing(Engine(target, None, **options)) as plain:
        expected = plain.generate(prompts, params)
    config = {"method": "gsd", "model": str(draft)}
    with contextlib.closing(Engine(target, config, [draft_every_level], **options)) as engine:
        assert_close(expected, prompts, generates(engine, params))
        assert engine.metrics()["spec_decode_num_accepted_tokens"] > 20


def build_looped(folder):
    """IQuestLoopCoder: Llama's layers run twice, the second time also within a window that has its own config key."""
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(5)
    shape = {key: value for key, value in SHAPE.items() if key not in ("sliding_window", "num_hidden_layers")}
    shape.update(num_hidden_layers=2, hidden_size=128)  # a multiple of the number of heads
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).float()
    gates = {}
    for layer in range(2):
        gates[f"model.gate_projections.{layer}.weight"] = torch.randn(4, 32)
        gates[f"model.gate_projections.{layer}.bias"] = torch.randn(4)
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        weights = folder / name / "model.safetensors"
        save_file({**load_file(weights), **gates}, weights, metadata={"format": "pt"})
        config = json.loads((folder / name / "config.json").read_text())
        config.update(architectures=["IQuestLoopCoderForCausalLM"], loop_num=2, loop_window_size=WINDOW)
        (folder / name / "config.json").write_text(json.dumps(config))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight += 0.04 * weight.std() * torch.randn_like(weight)
    return folder / "target", folder / "draft"


def mask_all_rows(llm):
    """Make our kernel also attend prompts and chains, as it does in bfloat16."""
    runner = model_runner(llm)
    runner.masks_chains = runner.speculation.drafter.masks_chains = True


def test_windows_that_only_the_layers_know(tmp_path, random_prompts):
    """Such windows are applied to prompts by any kernel, and are refused if they are shorter than a path."""
    target, draft = build_looped(tmp_path)
    config = {"method": "gsd", "model": str(draft), "num_speculative_tokens": NODES}
    prompts = [prompt + prompt[-20:] for prompt in random_prompts(6, 30, 150)]
    results = []
    for gsd, setup in ((None, []), (config, [draft_every_level, mask_all_rows])):
        with contextlib.closing(Engine(target, gsd, setup, skip_tokenizer_init=True)) as engine:
            results.append(run(engine, prompts, {"temperature": 0, "max_tokens": 60, "ignore_eos": True}))
            moved = engine.metrics().get("gsd_kv_rows_moved")
    assert results[0] == results[1]
    assert moved > 0
    kind = rf'window {WINDOW}\) with "num_speculative_tokens" {WINDOW} in layer model.layers.2.self_attn.attn; set it'
    with pytest.raises(Exception, match=kind):
        Engine(target, {**config, "num_speculative_tokens": WINDOW}, skip_tokenizer_init=True)


def test_windows_shorter_than_a_path_are_refused(tmp_path):
    target, draft = build(tmp_path, *FAMILIES["every layer"])
    with pytest.raises(
        Exception, match=f'window {WINDOW}. with "num_speculative_tokens" {WINDOW}; set it below the window'
    ):
        Engine(
            target, {"method": "gsd", "model": str(draft), "num_speculative_tokens": WINDOW}, skip_tokenizer_init=True
        )
