"""Blocks of fewer layers that are made from other blocks, and blocks that learn from others."""

import pytest
import torch
from distill_world import files, student

from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.tools.distill import blocks, speculators_students
from vllm_gsd.tools.distill.data import load_answers
from vllm_gsd.tools.distill.merge_layers import merge_layers
from vllm_gsd.tools.distill.states import StoredStates


def hidden_states(model, work):
    """What the block's LM head reads over the first answers."""
    batch = model.packs(StoredStates(work / "states")).collate(load_answers(files(work), 640)[:5])
    batch["hidden_states"] = batch["hidden_states"].float()
    found = blocks.chosen_blocks(batch["loss_mask"][0], batch["document_ids"][0], model.depth, 1.0)
    with torch.no_grad():
        return blocks.hidden_states(model.model, batch, found)


def silence(layer, *parts):
    """The layer without what its attention or MLP adds."""
    with torch.no_grad():
        for part in parts:
            {"attention": layer.self_attn.o_proj, "mlp": layer.mlp.down_proj}[part].weight.zero_()


@pytest.mark.parametrize(
    ("depth", "count", "stay"), [(2, 1, [1]), (3, 2, [0, 2]), (5, 3, [0, 2, 4]), (4, 3, [0, 2, 3])]
)
def test_a_merged_block_computes_what_the_draft_does_without_the_others_outputs(
    target, work, tmp_path, depth, count, stay
):
    """Layers that add nothing can go: neither their heads nor the silent ones change what the others compute."""
    draft = student("dspark", target, layers=depth)
    for number in set(range(depth)) - {*stay}:
        silence(draft.model.layers[number], "attention", "mlp")
    for parameter in draft.parameters():  # as the folder has them
        parameter.data = parameter.data.bfloat16().float()
    expected = hidden_states(draft, work)
    draft.save(tmp_path / "draft")
    merged = student("dspark", target, init=str(tmp_path / "draft"), layers=count)
    torch.testing.assert_close(hidden_states(merged, work), expected, rtol=1e-4, atol=1e-4)
    merged.save(tmp_path / "merged")
    check_draft(str(tmp_path / "merged"), 300, target)
    again = student("dspark", target, init=str(tmp_path / "merged"))
    assert len(again.model.layers) == count
    # Its weights are rounded to bfloat16.
    torch.testing.assert_close(hidden_states(again, work), expected, rtol=0.05, atol=0.05)


def test_heads_of_the_layer_that_goes_read_what_the_next_one_reads(target, work, tmp_path):
    """With the layer before silent, the next one's input is the same, so the order of the two does not matter."""
    draft = student("dspark", target, layers=2)
    first, second = draft.model.layers
    silence(first, "mlp")
    for parameter in draft.parameters():
        parameter.data = parameter.data.bfloat16().float()
    draft.save(tmp_path / "draft")
    draft = student("dspark", target, init=str(tmp_path / "draft"))  # saving turned the other one into bfloat16
    first, second = draft.model.layers
    added = []
    first.self_attn.register_forward_hook(lambda module, args, output: added.append(output[0]) or (0 * output[0], None))
    second.self_attn.register_forward_hook(lambda module, args, output: (output[0] + added[0], None))
    expected = hidden_states(draft, work)
    merged = student("dspark", target, init=str(tmp_path / "draft"), layers=1)
    torch.testing.assert_close(hidden_states(merged, work), expected, rtol=1e-4, atol=1e-4)


def test_queries_make_up_for_the_other_layers_norm(target):
    model = student("dspark", target, layers=2).model
    norms = [torch.rand(64) + 0.5, torch.rand(64) + 0.5]
    for layer, norm in zip(model.layers, norms, strict=True):
        layer.input_layernorm.weight.data = norm
    merged, times = merge_layers(model.state_dict(), 2, 1)
    queries = merged["layers.0.self_attn.q_proj.weight"] * merged["layers.0.input_layernorm.weight"]
    expected = [layer.self_attn.q_proj.weight * norm for layer, norm in zip(model.layers, norms, strict=True)]
    assert times == 2
    torch.testing.assert_close(queries, torch.cat(expected))


@pytest.mark.parametrize("merged", [True, False])
def test_another_block_teaches(target, work, tmp_path, monkeypatch, merged):
    """The student comes nearer to what the teacher computes, which stays as it is and is not part of what is kept."""
    draft = student("dspark", target, layers=3)
    for layer in draft.model.layers:
        layer.self_attn.o_proj.weight.data *= 40  # so that it matters what a layer reads
    draft.save(tmp_path / "draft")
    made_from = {"init": str(tmp_path / "draft")} if merged else {}
    model = student("dspark", target, teacher=str(tmp_path / "draft"), layers=2, **made_from)
    data, packs = load_answers(files(work), 640), model.packs(StoredStates(work / "states"))
    model.start(data, packs, new=not merged)
    before = [parameter.clone() for parameter in model.teacher.parameters()]
    assert not any(name.startswith("teacher") for name in model.state_dict())
    batch = packs.collate(data[:8])
    batch = {name: rows.float() if rows.is_floating_point() else rows for name, rows in batch.items()}
    found = blocks.chosen_blocks(batch["loss_mask"][0], batch["document_ids"][0], model.depth, 1.0)

    def error():
        with torch.no_grad():
            own, wanted = (blocks.hidden_states(one, batch, found) for one in (model.model, model.teacher))
        return float((own - wanted).square().sum() / wanted.square().sum())

    monkeypatch.setattr(speculators_students, "TEACHING", 100.0)
    optimizer, first = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 1e-3), error()
    torch.manual_seed(0)
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    assert error() < 0.5 * first
    assert all(torch.equal(*pair) for pair in zip(before, model.teacher.parameters(), strict=True))
