"""In bfloat16, matrices are packed for our own kernel, and answers equal plain vLLM's up to rounding."""

import contextlib

import pytest
import torch
from adapters import RANK, build_adapter, generate_adapted
from engine_process import Engine, Params, model_runner
from rounding import assert_close, generates
from transformers import AutoModelForCausalLM

from vllm_gsd.cpu.linear import packs

ENGINE = {"dtype": "bfloat16"}
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 2, "ignore_eos": True}

pytestmark = pytest.mark.skipif(
    not packs(torch.empty(16, 2, dtype=torch.bfloat16)) or torch.cpu._is_amx_tile_supported(),
    reason="on this processor, vLLM's own matrix products are used",
)


def layers_by_kind(llm) -> dict[str, set[bool]]:
    """Whether layers with CPU matrix products are packed, by model and class of layer."""
    runner = model_runner(llm)
    packed: dict[str, set[bool]] = {}
    for name, model in (("target", runner.model), ("draft", runner.speculation.drafter.model.model)):
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                ours = "vllm_gsd" in module.cpu_linear.__module__
                packed.setdefault(f"{name} {type(module).__name__}", set()).add(ours)
    return packed


def weights_of_ends(llm) -> list[tuple[int, int]]:
    """Addresses and dimensions of the target's embedding and LM head."""
    model = model_runner(llm).model
    return [(layer.weight.data_ptr(), layer.weight.dim()) for layer in (model.model.embed_tokens, model.lm_head)]


def read_again(llm, folder):
    """Read the target's weights again, from the folder of a model of the same shape."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()


def test_all_layers_are_packed(gsd):
    packed = gsd.call(layers_by_kind)
    for name in ("target", "draft"):
        layers = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear")
        assert all(packed[f"{name} {layer}"] == {True} for layer in layers)
    assert packed["target ParallelLMHead"] == {True}


@pytest.fixture
def tied_target(tiny_pair, tmp_path):
    """The tiny target with tied word embeddings."""
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target)
    model.config.tie_word_embeddings = True
    model.model.embed_tokens.weight = model.lm_head.weight
    model.save_pretrained(tmp_path)
    return tmp_path


def test_embedding_and_lm_head(gsd, plain, tied_target, tiny_pair, random_prompts):
    """A tied matrix is stored once, packed. An embedding that is not tied to the LM head is not packed."""
    embedding, lm_head = gsd.call(weights_of_ends)
    assert embedding[1] == 2 and lm_head[1] == 5
    prompts = random_prompts(5, 5, 60)
    configs = [None, {"method": "gsd", "model": str(tiny_pair.draft)}]
    with contextlib.ExitStack() as stack:
        engines = [Engine(tied_target, config, skip_tokenizer_init=True, **ENGINE) for config in configs]
        for engine in engines:
            stack.callback(engine.close)
        embedding, lm_head = engines[1].call(weights_of_ends)
        assert embedding == lm_head and lm_head[1] == 5
        expected = engines[0].generate(prompts, GREEDY)
        assert_close(expected, prompts, generates(engines[1], GREEDY))
        engines[1].call(read_again, tied_target)
        assert engines[1].call(weights_of_ends) == [embedding, lm_head]
        assert_close(expected, prompts, generates(engines[1], GREEDY))


def test_weights_that_are_read_again(gsd, plain, tiny_pair, random_prompts):
    """New weights are packed like the old ones, and lie where compiled code reads those."""
    places, prompts = gsd.call(weights_of_ends), random_prompts(5, 5, 60)
    for engine in (plain, gsd):
        engine.call(read_again, tiny_pair.draft)
    assert gsd.call(weights_of_ends) == places
    assert_close(plain.generate(prompts, GREEDY), prompts, generates(gsd, GREEDY))
    for engine in (plain, gsd):
        engine.call(read_again, tiny_pair.target)


def test_other_types_are_upstreams(start_engine):
    packed = start_engine({}).call(layers_by_kind)  # float32
    assert packed and all(values == {False} for values in packed.values())


def test_answers(plain, gsd, random_prompts):
    prompts = random_prompts(24, 5, 200)
    params = {**GREEDY, "prompt_logprobs": 1}
    assert_close(plain.generate(prompts, params), prompts, generates(gsd, params))


def test_adapters(start_engine, tiny_pair, random_prompts, tmp_path):
    """The adapters' products are added to those of packed layers."""
    adapters = [build_adapter(tmp_path / str(seed), tiny_pair.target, seed) for seed in range(2)]
    prompts, chosen = random_prompts(9, 5, 80), [None, *adapters] * 3
    options = {**ENGINE, "enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
    theirs = start_engine(None, **options).call(generate_adapted, prompts, [Params(GREEDY)] * 9, chosen)
    ours = start_engine({}, **options)

    def generate(places, texts, lengths):
        params = [Params({**GREEDY, "max_tokens": length}) for length in lengths]
        return ours.call(generate_adapted, texts, params, [chosen[place] for place in places])

    assert_close(theirs, prompts, generate)
    assert theirs[0].tokens != theirs[1].tokens
