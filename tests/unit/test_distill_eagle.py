"""Students of EAGLE's kind: what training plays through, against a layer that runs over real paths."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_gsd.config.draft_kind import is_eagle
from vllm_gsd.tools.distill import eagle, hidden_states
from vllm_gsd.tools.distill.generate import TOP
from vllm_gsd.tools.distill.run import DistillError, Options, distill
from vllm_gsd.tools.distill.train import load_answers
from vllm_gsd.tools.distill.validate import agreement

SIZE, HIDDEN = 300, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=SIZE, num_hidden_layers=2, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    """Two files of answers, as ``generate.answer`` writes them, and their hidden states."""
    folder = tmp_path_factory.mktemp("work")
    rng = np.random.default_rng(0)
    files = []
    for name in ("first-00000", "second-00000"):
        rows = []
        for length in rng.integers(5, 30, 12):
            top = rng.integers(0, SIZE, (length - 3) * TOP)
            rows.append(
                {
                    "input_ids": rng.integers(0, SIZE, length).tolist(),
                    "prompt_len": 3,
                    "top_ids": top.tolist(),
                    "top_logprobs": np.full(len(top), -2.0).tolist(),
                    "text": "",
                }
            )
        files.append(folder / f"{name}.parquet")
        Dataset.from_list(rows).to_parquet(str(files[-1]))
    return files, hidden_states.write_features(target, files, folder / "features", batch_tokens=64)


def random_student(target) -> eagle.EagleStudent:
    torch.manual_seed(1)
    config = eagle.eagle_config(json.loads((target / "config.json").read_text()))
    model = eagle.EagleStudent(config, *eagle.target_ends(target), torch.arange(0, SIZE, 2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.embedding = model.embedding.float() * 10
    return model


class TestLevels:
    @torch.no_grad()
    def test_a_level_is_a_path_below_committed_text(self, target):
        model = random_student(target)
        tokens, features = torch.randint(0, SIZE, (1, 12)), torch.randn(1, 12, HIDDEN)
        levels = model.levels(tokens, features, 4)
        for level in range(4):
            for end in range(level, 12):
                # The text to the root with the target's states, then one node after the other with the one before's.
                root = end - level
                states = features[:, : root + 1]
                for _ in range(level):
                    out = model.levels(tokens[:, : states.shape[1]], states, 1)[0]
                    states = torch.cat((states, out[:, -1:]), 1)
                out = model.levels(tokens[:, : end + 1], states, 1)[0][:, -1]
                torch.testing.assert_close(levels[level][:, end], out, rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    @pytest.mark.parametrize("first", [1, 5, 11])
    def test_a_part_of_it_is_the_same(self, target, first):
        model = random_student(target)
        tokens, features = torch.randint(0, SIZE, (2, 12)), torch.randn(2, 12, HIDDEN)
        whole, part = model.levels(tokens, features, 4), model.levels(tokens, features, 4, first)
        for level in range(4):
            expected = whole[level] if level == 0 else whole[level][:, first:]
            torch.testing.assert_close(part[level], expected, rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    def test_the_loss_is_that_of_the_levels(self, target, monkeypatch):
        model = random_student(target)
        monkeypatch.setattr(eagle, "NEGATIVES", 20_000)  # with so many draws all of the vocabulary is there
        batch = {
            "input_ids": torch.randint(0, SIZE, (2, 9)),
            "attention_mask": torch.ones(2, 9, dtype=torch.int64),
            "features": torch.randn(2, 9, HIDDEN),
            "rows": torch.tensor([4, 5, 6, 7, 12, 13]),
            "top_ids": torch.randint(0, SIZE, (6, TOP)),
            "top_logprobs": torch.randn(6, TOP) - 2,
        }
        expected = 0.0
        for level, hidden in enumerate(model.levels(batch["input_ids"], batch["features"], eagle.LEVELS)):
            logits = hidden.flatten(0, 1)[batch["rows"]].bfloat16() @ model.head.T
            chances = logits.float().log_softmax(-1)
            for row in range(6):
                for token, logprob in zip(batch["top_ids"][row], batch["top_logprobs"][row], strict=True):
                    if token % 2 == 0:
                        share = eagle.LEVEL_WEIGHT**level * logprob.exp() / 6
                        expected -= float(share * chances[row, token // 2])
        assert float(model(**batch)["loss"]) == pytest.approx(expected, rel=2e-3)


class TestFeatures:
    def test_they_are_the_targets_last_hidden_states(self, target, answers):
        files, features = answers
        whole = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        data = load_answers(files, 25)
        assert 0 < len(data) < 24 and max(data["length"]) <= 25
        for row in data:
            ids = torch.from_numpy(row["input_ids"].astype(np.int64))
            with torch.no_grad():
                expected = whole.model(input_ids=ids[None])[0][0]
            torch.testing.assert_close(features.of(row), expected, rtol=0.1, atol=0.1)

    def test_a_row_gets_what_came_before_it(self, answers):
        files, features = answers
        data = load_answers(files, 640)
        rows = [data[0], data[20]]
        batch = features.collate(rows)
        assert not batch["features"][:, 0].any()
        for line, row in enumerate(rows):
            own = features.of(row)[:-1].bfloat16()
            assert torch.equal(batch["features"][line, 1 : len(own) + 1], own)

    def test_what_is_there_is_not_run_again(self, target, answers, monkeypatch):
        files, features = answers
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("runs"))
        assert hidden_states.write_features(target, files, features.folder).folder == features.folder


def test_the_start_is_the_least_squares_fit_and_loads_again(target, answers, tmp_path):
    files, features = answers
    data = load_answers(files, 640)
    eagle.make_start(target, tmp_path / "start", np.arange(200), data, features)
    assert is_eagle(tmp_path / "start") and not is_eagle(target)
    model = eagle.load(tmp_path / "start", target)
    assert (
        model.head.shape == (200, HIDDEN) and model.fc.weight.any() and not model.layers[0].mlp.down_proj.weight.any()
    )
    known, wanted = [], []
    for row in data:
        own = features.of(row)
        known.append(torch.cat((model.embedding[row["input_ids"].astype(np.int64)][1:].float(), own[:-1]), -1))
        wanted.append(own[1:])
    known, wanted = torch.cat(known), torch.cat(wanted)
    off = (known @ model.fc.weight.T - wanted).square().mean()
    assert off < 0.9 * wanted.square().mean()
    noisy = model.fc.weight + 0.05 * torch.randn_like(model.fc.weight)
    assert off < (known @ noisy.T - wanted).square().mean()
    found = agreement(model, data, features.collate)
    assert 0 <= found["top_1"] <= found["top_4"] <= 1
    assert {name.split(".")[0] for name in model.state_dict()} == {"fc", "layers"}


@pytest.mark.parametrize(
    ("options", "said"),
    [({"params": 1000, "eagle": True}, "--eagle"), ({"init": "TARGET", "eagle": True}, "--init")],
)
def test_what_does_not_go_together(target, tmp_path, options, said):
    options = {key: str(target) if value == "TARGET" else value for key, value in options.items()}
    with pytest.raises(DistillError, match=said):
        distill(Options(target=str(target), **options), tmp_path / "out", tmp_path / "work")
