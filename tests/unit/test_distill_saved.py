"""What a draft's folder computes, what a student begins with, and what it learns from."""

import numpy as np
import pytest
import torch
from distill_world import PROMPT, files, student
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.tools.distill.data import Answer, divided, load_answers
from vllm_gsd.tools.distill.hardware import CPU
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.packs import Packs
from vllm_gsd.tools.distill.speculators_students import BlockStudent, Eagle3Student
from vllm_gsd.tools.distill.states import StoredStates
from vllm_gsd.tools.distill.target import Target
from vllm_gsd.tools.errors import ToolError


@pytest.mark.parametrize(
    ("kind", "norms"),
    [("dspark", {}), ("eagle3", {}), ("eagle3", {"fc_norm": True}), ("eagle3", {"norm_before_fc": True})],
)
def test_the_folder_computes_what_was_trained(target, work, tmp_path, monkeypatch, kind, norms):
    """Engines give a draft the states as they are. A head of another program may have norms before its first layer."""
    shape = Eagle3Student.shape
    monkeypatch.setattr(Eagle3Student, "shape", lambda *arguments: {**shape(*arguments), **norms})
    model, data, stored = student(kind, target), load_answers(files(work), 640), StoredStates(work / "states")
    size = torch.ones(3, 64)
    for layer, large in enumerate((60.0, 1000.0, 150.0)):  # as some dimensions of language models are
        size[layer, layer : layer + 3] = large
    trained, raw = (
        Packs(lambda answers: [size * rows for rows in stored(answers)], model.padding, model.shift, torch.float32)
        for _ in range(2)
    )

    def logits(drafting, packs):
        drafting.hardware = CPU._replace(dtype=torch.float32)
        torch.manual_seed(3)
        with torch.no_grad():
            return drafting.drafted(packs.collate(data[:4])).logits

    model.start(data, trained, new=True)
    model._rescale(model.scale)
    for parameter in model.parameters():  # as numbers in bfloat16, which the folder has
        parameter.data = parameter.data.bfloat16().float()
    model._rescale(1 / model.scale)
    expected = logits(model, trained)
    model.save(tmp_path / "draft")
    found = logits(student(kind, target, init=str(tmp_path / "draft")), raw)
    assert (trained.scale is None) == bool(norms)
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("stay", [[4], [0, 2, 4]])
def test_a_language_model_goes_on_with_some_of_its_layers(target, tmp_path, stay):
    whole = student("lm", target, layers=5)
    whole.save(tmp_path / "whole")
    student("lm", target, init=str(tmp_path / "whole"), layers=len(stay)).save(tmp_path / "some")
    check_draft(str(tmp_path / "some"), 300, target)
    some = student("lm", target, init=str(tmp_path / "some"))
    layers, expected = (draft.model.model.layers for draft in (some, whole))
    assert len(layers) == len(stay)
    for layer, number in zip(layers, stay, strict=True):
        weights = expected[number].state_dict()
        for name, weight in layer.state_dict().items():
            assert torch.equal(weight.bfloat16(), weights[name].bfloat16())
    fewer = student("lm", target, layers=len(stay))
    assert {name: rows.shape for name, rows in some.named_parameters()} == {
        name: rows.shape for name, rows in fewer.named_parameters()
    }


def test_a_language_model_with_types_of_layers_goes_on_with_some_of_them(target, tmp_path):
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "whole")
    student("lm", target, init=str(tmp_path / "whole"), layers=2).save(tmp_path / "some")
    assert AutoConfig.from_pretrained(tmp_path / "some").layer_types == ["full_attention"] * 2


def test_the_mask_of_a_block_has_an_embedding(target):
    """The rarest tokens of some targets have none: they are reserved, and the target never learned them."""
    loaded = Target(target)
    loaded.embedding[290:] = 0
    options = Options(target=str(target), vocab_size=256)
    assert BlockStudent.make(options, loaded, np.arange(300)).model.config.mask_token_id == 289


def test_answers_are_cut_and_too_short_ones_left_out(work, caplog):
    whole, cut = (load_answers(files(work), longest) for longest in (640, 20))
    assert len(cut) == len(whole) and max(len(row.input_ids) for row in whole) > 20
    for one, other in zip(whole, cut, strict=True):
        assert one.input_ids[:20].tolist() == other.input_ids.tolist() and one.first == other.first
    assert not caplog.text
    with pytest.raises(ToolError, match=f"--longest is {PROMPT + 1}, but no request"):
        load_answers(files(work), PROMPT + 1)
    assert "24 of 24 answers are left out, because they have fewer than 2 tokens within --longest 4" in caplog.text


def test_no_request_is_on_both_sides():
    """Many users ask the same, and greedy answers to it are the same, too."""
    requests = [index % 130 for index in range(400)]
    data = [Answer(np.array([request, 7, index]), 1, "first", 0) for index, request in enumerate(requests)]
    training, held_out = divided(data)
    asked = {int(answer.input_ids[0]) for answer in held_out}
    assert asked == {0, 40, 80, 120} and asked.isdisjoint(int(answer.input_ids[0]) for answer in training)
    assert len(training) + len(held_out) == 400
    assert [len(side) for side in divided(data[:1])] == [1, 1]
