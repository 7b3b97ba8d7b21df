"""The target's own MTP module as a draft on V2: the chain of vLLM's own method, and plain V2's output."""

import shutil

import pytest
from hard_requests import SCARCE, ask, check_counts, hard_prompts
from start_probes import start_of
from test_v2_drafts import CHAIN, DEPTH, ENGINE, GRAPH, drafted
from tiny_mtp import build_tiny_mtp
from v2_engine import V2Engine

ON_GPUS = {"gpu_attention": True, "cuda_graphs": True}


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return hard_prompts(random_prompts)


@pytest.fixture(scope="module")
def target(text_pair, prompts, tmp_path_factory):
    folder = build_tiny_mtp(tmp_path_factory.mktemp("mtp"), "MiMo", prompts[:2])
    for file in text_pair.target.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_same_module_same_chain(target, prompts):
    """With one candidate, vLLM's drafts and steps, also as on GPUs. The last drafts are shorter here."""
    ours = {"method": "gsd", "model": str(target), **CHAIN}
    found = []
    for config, more in ({"method": "mtp", "num_speculative_tokens": DEPTH}, {}), (ours, {}), (ours, ON_GPUS):
        engine = V2Engine(target, config, **more, **ENGINE)
        found.append(drafted(engine, prompts[0]))
        if more:  # sleep mode discards hidden states together with keys and values
            assert engine.call(start_of)[1]["Features"] == ["kv_cache"]
        engine.close()
    (tokens, theirs), *both = found
    for ours_tokens, chain in both:
        assert ours_tokens == tokens
        assert len(chain) == len(theirs) < 15
        assert chain[: -DEPTH - 1] == theirs[: -DEPTH - 1] and len(chain) > DEPTH + 1


def test_equals_plain_v2(target, prompts):
    answers = []
    for config, more in (None, {}), ({"method": "gsd", "model": str(target), **GRAPH}, SCARCE):
        engine = V2Engine(target, config, **{**ENGINE, **more})
        answers.append(ask(engine, prompts, 12))
        if config is not None:
            check_counts(engine.metrics(), levels=True)
        engine.close()
    assert answers[0] == answers[1]
