"""The parts of ``vllm-gsd distill`` that need no engine."""

import json
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distill_world import CONFIG, PROMPT, files, student, write_answers
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.config.draft_kind import kind_of
from vllm_gsd.config.draft_vocab import read_draft_vocab
from vllm_gsd.tools.distill import engine, run, states, students
from vllm_gsd.tools.distill.data import Answer, count_tokens, load_answers
from vllm_gsd.tools.distill.hardware import CPU
from vllm_gsd.tools.distill.lm import project
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.packs import Packs
from vllm_gsd.tools.distill.states import ComputedStates, StoredStates, state_layers
from vllm_gsd.tools.distill.target import Target
from vllm_gsd.tools.distill.train import train
from vllm_gsd.tools.distill.validate import agreement
from vllm_gsd.tools.errors import ToolError


def assert_rows_close(rows, exact):
    """Compare rows computed in bfloat16 and in float32 by their norms, as single numbers depend on the processor."""
    errors = (rows.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors.max() < 0.05, errors


class TestStates:
    @pytest.mark.parametrize(
        ("depth", "layers"), [(30, [8, 16, 24, 30]), (32, [8, 16, 24, 32]), (5, [2, 4, 5]), (2, [1, 2]), (1, [1])]
    )
    def test_layers(self, depth, layers):
        assert state_layers(depth) == layers

    def test_they_are_the_targets(self, target, work):
        """They equal those of transformers. The last layer's precede the final norm and give the target's logits."""
        whole = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        data, stored = load_answers(files(work), 30), StoredStates(work / "states")
        assert len(data) == 24 and max(len(row.input_ids) for row in data) == 30
        for row, layers in zip(data, stored(data), strict=True):
            with torch.no_grad():
                output = whole(torch.from_numpy(row.input_ids)[None], output_hidden_states=True)
            for index, layer in enumerate(state_layers(5)[:-1]):
                assert_rows_close(layers[:, index], output.hidden_states[layer][0])
            assert_rows_close(Target(target).logits(layers[:, -1]), output.logits[0])

    def test_a_batch_has_texts_one_after_the_other(self, work):
        data = load_answers(files(work), 640)
        stored, rows = StoredStates(work / "states"), [data[0], data[20]]
        batch = Packs(stored, padding=2).collate(rows)
        first, second = (len(row.input_ids) for row in rows)
        assert batch["document_ids"].tolist() == [[0] * (first + 2) + [1] * (second + 2)]
        assert batch["input_ids"][0, first + 2 :][:-2].tolist() == rows[1].input_ids.tolist()
        assert batch["position_ids"][0, first + 2] == 0
        known = batch["loss_mask"][0, : first + 2].nonzero()[:, 0].tolist()
        assert known == list(range(PROMPT - 1, first - 1))
        (own,) = stored(rows[1:])
        assert torch.equal(batch["verifier_last_hidden_states"][0, first + 2 :][:-2], own[:, -1])
        assert torch.equal(batch["hidden_states"][0, first + 2 :][:-2], own.flatten(1))

    def test_shifted_a_token_has_the_states_before_it(self, work):
        row = load_answers(files(work), 640)[3]
        stored = StoredStates(work / "states")
        plain, shifted = (Packs(stored, shift=shift).collate([row]) for shift in (False, True))
        for name, rows in shifted.items():
            assert torch.equal(rows, plain[name][:, :-1] if name == "hidden_states" else plain[name][:, 1:])

    @pytest.mark.parametrize("kind", ["dspark", "eagle3", "lm"])
    def test_computed_they_are_as_stored(self, target, work, monkeypatch, kind):
        """States computed in several forward passes give the same batches and the same agreement as stored ones."""
        monkeypatch.setitem(states.BATCH_TOKENS, "cpu", 100)
        data, results = load_answers(files(work), 640), []
        for source in (StoredStates(work / "states"), ComputedStates(target, "cpu")):
            model = student(kind, target)
            packs = model.packs(source)
            model.start(data, packs, new=True)
            results.append((packs.collate([data[i] for i in (0, 20, 5)]), agreement(model, data, packs)))
        (batch, agreed), (computed, other) = results
        assert {name: rows.dtype for name, rows in computed.items()} == {name: batch[name].dtype for name in computed}
        torch.testing.assert_close(computed, batch, rtol=0.05, atol=0.05)
        assert not any(rows.requires_grad or rows.is_inference() for rows in computed.values())
        for name, shares in agreed.items():
            assert other[name] == pytest.approx(shares, abs=0.05), name

    def test_what_is_there_is_not_run_again(self, target, work, monkeypatch):
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("runs"))
        states.write_missing(target, files(work), work / "states")


def test_the_layer_shape_of_an_older_config_keeps_its_rotary_embedding(target, tmp_path):
    """transformers before version 5 wrote ``rope_theta`` and ``rope_scaling``, or left out what its class has."""
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"rope_type": "linear", "factor": 2.0}
    for older, expected in (
        ({"rope_theta": 5e5, "rope_scaling": scaling}, {"rope_theta": 5e5, **scaling}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({}, {"rope_theta": 1e4, "rope_type": "default"}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **older}))
        assert Target(tmp_path).layer_shape()["rope_parameters"] == expected


def test_tokens_of_answers_are_counted(work):
    data = load_answers(files(work), 640)
    counts = np.zeros(300, int)
    for row in data:
        np.add.at(counts, row.input_ids[PROMPT:], 1)
    assert len(data) == 24 and count_tokens(data, 300).tolist() == counts.tolist()


class TestStudents:
    def test_answers_shorter_than_a_chain_tell_no_agreement(self, target, work, tmp_path):
        model, data = student("dspark", target), load_answers(files(work), 640)
        short = data[0]._replace(input_ids=data[0].input_ids[: PROMPT + 2])
        assert agreement(model, [short], model.packs(StoredStates(work / "states"))) == {}
        (tmp_path / "trained").mkdir()
        facts = {"steps": 9, "batch": 8, "trained": 7, "vocab_size": 256}
        run._finish(Options(target=str(target)), work, tmp_path, tmp_path / "draft", data, facts)
        assert "held-out" not in (tmp_path / "draft" / "README.md").read_text()

    def test_a_head_learns_from_a_text_shorter_than_it_drafts(self, target):
        model = student("eagle3", target, depth=5)
        packs = model.packs(ComputedStates(target, "cpu"))
        text = Answer(np.array([5, 6, 7]), 1, "", 0)
        with model.hardware.autocast():
            assert len(text.input_ids) < model.depth and model(**packs.collate([text]))["loss"] > 0
        assert agreement(model, [text], packs) == {}

    def test_the_target_agrees_with_itself(self, target, work):
        """The target, as its own draft, agrees with itself, whether texts are packed or not."""
        model, data = student("lm", target, init=str(target)), load_answers(files(work), 640)
        packs = model.packs(StoredStates(work / "states"))
        for size in (1, 3):
            model.hardware = CPU._replace(pack=size)
            agreed = agreement(model, data, packs)
            assert agreed["top_1"][0] > 0.9 and agreed["top_4"] == [1.0]
            assert agreed["chain"] == agreed["top_1"][0]
        # A text does not attend to the one before it in a pack.
        with torch.no_grad():
            together = model.drafted(packs.collate([data[0], data[1]])).logits
            alone = model.drafted(packs.collate([data[1]])).logits
        torch.testing.assert_close(together[-len(alone) :], alone, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("kind", ["dspark", "eagle3"])
    def test_what_is_drafted_depends_on_the_text_before_alone(self, target, work, kind):
        """Changed tokens and states change only the drafts that come after them."""
        model, data = student(kind, target), load_answers(files(work), 640)
        packs = model.packs(StoredStates(work / "states"))
        batch = packs.collate([data[0], data[1]])
        batch = {name: rows.float() if rows.is_floating_point() else rows for name, rows in batch.items()}
        changed, place = {name: rows.clone() for name, rows in batch.items()}, len(data[0].input_ids) - 5
        changed["input_ids"][0, place:] = 7
        changed["hidden_states"][0, place:] += 1
        outputs = []
        for inputs in (batch, changed):
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(model.drafted(inputs))
        (drafted, other), rows = outputs, outputs[0].rows
        assert torch.equal(drafted.chains, other.chains) and drafted.chains.shape[1] == model.depth
        starts = rows[drafted.chains[:, 0]]
        first = drafted.chains[:, 0]
        same = (drafted.logits[first] - other.logits[first]).abs().amax(1) < 1e-4
        assert same[starts < place].all() and not same[starts >= place].any()
        assert (starts < place).any() and (starts >= place).any()
        chains = rows[drafted.chains]
        assert torch.equal(chains, chains[:, :1] + torch.arange(model.depth))
        assert batch["loss_mask"][0, chains].all()

    @pytest.mark.parametrize("kind", ["dspark", "eagle3", "lm"])
    def test_they_learn_are_saved_and_load_again(self, target, work, tmp_path, kind):
        model, data = student(kind, target), load_answers(files(work), 640)
        packs = model.packs(StoredStates(work / "states"))
        options = Options(target=str(target), kind=kind, epochs=20, learning_rate=3e-3)
        model.start(data, packs, new=True)
        before = agreement(model, data, packs)
        assert train(model, tmp_path, data, packs, options, None) == (40 if kind == "dspark" else 60)
        after = agreement(model, data, packs)
        assert after["chain"] > before["chain"] + 0.1
        assert all(0 <= best <= four <= 1 for best, four in zip(after["top_1"], after["top_4"], strict=True))
        model.save(tmp_path / "draft")
        assert kind_of(tmp_path / "draft") == ("language model" if kind == "lm" else kind)
        check_draft(str(tmp_path / "draft"), 300, target)
        assert str(target) not in (tmp_path / "draft" / "config.json").read_text()
        again = student(kind, target, init=str(tmp_path / "draft"))
        again.start(data, packs, new=False)
        assert agreement(again, data, packs)["chain"] == pytest.approx(after["chain"], abs=0.1)
        again.save(tmp_path / "again")  # of a trimmed language model, the frequent tokens are still first
        assert read_draft_vocab(tmp_path / "again") == read_draft_vocab(tmp_path / "draft")

    def test_a_checkpoint_that_was_being_saved_is_passed_over(self, target, work, tmp_path):
        """The Trainer saves the weights first and its own state last."""
        options, data = Options(target=str(target), kind="lm", epochs=1), load_answers(files(work), 640)
        for turn in range(2):
            model = student("lm", target)
            assert train(model, tmp_path, data, model.packs(StoredStates(work / "states")), options, None) == 3
            weights = tmp_path / "checkpoints" / "checkpoint-3" / "model.safetensors"
            assert weights.is_file()
            if turn == 0:
                written = weights.stat().st_mtime_ns
                shutil.copytree(weights.parent, tmp_path / "checkpoints" / "checkpoint-10")
                (tmp_path / "checkpoints" / "checkpoint-10" / "trainer_state.json").unlink()
        assert weights.stat().st_mtime_ns == written  # nothing was left to train

    def test_a_narrow_target_has_a_block_of_lower_rank(self, tmp_path):
        LlamaForCausalLM(LlamaConfig(**{**CONFIG, "hidden_size": 32})).save_pretrained(tmp_path)
        (tmp_path / "work").mkdir()
        work = write_answers(tmp_path / "work", tmp_path)
        model = student("dspark", tmp_path)
        model.start(load_answers(files(work), 640), model.packs(StoredStates(work / "states")), new=True)
        assert model.model.config.markov_rank == 32
        wide = student("dspark", tmp_path, intermediate_size=48)
        assert {layer.mlp.gate_proj.out_features for layer in wide.model.layers} == {48}
        with pytest.raises(ToolError, match="needs a target of hidden size 64 or more"):
            run.distill(Options(target=str(tmp_path), kind="lm"), tmp_path / "out", tmp_path / "other")

    def test_a_block_starts_from_a_fit(self, target, work):
        """Before training, a block already agrees with the target and depends most on the last known state."""
        model, data = student("dspark", target), load_answers(files(work), 640)
        packs = model.packs(StoredStates(work / "states"))
        model.start(data, packs, new=True)
        states = torch.cat(packs.source(data)).flatten(1)
        usual = (states * packs.scale).abs().median(0).values.float()
        assert usual.mean() == pytest.approx(1, abs=0.2)
        other = student("dspark", target)
        random = agreement(other, data, other.packs(packs.source))
        fitted = agreement(model, data, packs)
        assert fitted["top_1"][0] > random["top_1"][0] + 0.1 and fitted["top_4"][0] > random["top_4"][0] + 0.1
        batch = {
            name: rows.float() if rows.is_floating_point() else rows for name, rows in packs.collate([data[1]]).items()
        }
        (anchor,) = [len(data[1].input_ids) - 1 - model.depth]
        batch["loss_mask"] = torch.arange(batch["loss_mask"].shape[1])[None] == anchor  # keep one anchor
        changes = []
        for distance in (1, 4):
            changed = {**batch, "hidden_states": batch["hidden_states"].clone()}
            changed["hidden_states"][0, anchor - distance] *= -1
            with torch.no_grad():
                drafted, other = model.drafted(batch), model.drafted(changed)
            changes.append((drafted.logits - other.logits).abs().mean())
        assert changes[0] > 2 * changes[1]

    @pytest.mark.parametrize("kind", ["dspark", "eagle3", "lm"])
    def test_float32_and_bfloat16(self, target, work, monkeypatch, kind):
        losses = []
        for hardware in (CPU._replace(dtype=torch.float32), CPU._replace(dtype=torch.bfloat16)):
            monkeypatch.setattr(students, "found_hardware", lambda found=hardware: found)
            model, source = student(kind, target), ComputedStates(target, "cpu", dtype=hardware.dtype)
            torch.manual_seed(1)
            batch = model.packs(source).collate(load_answers(files(work), 640)[:4])
            with model.hardware.autocast():
                losses.append(model(**batch)["loss"].float())
        torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)

    def test_projection_keeps_what_is_alike(self):
        base = torch.randn(100, 4) @ torch.randn(4, 64)
        small = project(base, 4)
        torch.testing.assert_close(small @ small.T, base @ base.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("prompt", "length"), [(20, 116), (1000, 1024)])
def test_engines_that_measure_a_draft_have_no_more_positions_than_the_target(tmp_path, monkeypatch, prompt, length):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    result = {"requests": [{"tokens": 8, "steps": 4}], "seconds": 1.0}
    given = []

    @contextmanager
    def running(setting, work):
        given.append(work.engine_args["max_model_len"])
        yield SimpleNamespace(run=lambda job: result)

    monkeypatch.setattr(engine, "running", running)
    found = engine.compare(tmp_path, tmp_path / "draft", [[1] * 10, [1] * prompt], 96, True, tmp_path / "logs")
    assert given == 3 * [length] and found["ratio_to_plain"] == 1
