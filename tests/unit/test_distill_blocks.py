"""The forward pass of blocks and the loss of their LM head, compared with speculators' and PyTorch's own."""

import pytest
import torch
from distill_world import files, student
from speculators.models.dflash import core

from vllm_gsd.tools.distill import blocks, speculators_students, students
from vllm_gsd.tools.distill import loss as losses
from vllm_gsd.tools.distill import target as targets
from vllm_gsd.tools.distill.data import load_answers
from vllm_gsd.tools.distill.hardware import CPU
from vllm_gsd.tools.distill.loss import HeadLoss
from vllm_gsd.tools.distill.states import StoredStates


def packed(work, model, count):
    """A batch of the first answers, in float32."""
    batch = model.packs(StoredStates(work / "states")).collate(load_answers(files(work), 640)[:count])
    return {name: rows.float() if rows.is_floating_point() else rows for name, rows in batch.items()}


@pytest.mark.parametrize(("layers", "share"), [(1, 0.1), (2, 0.6), (3, 1.0)])
def test_blocks_compute_what_speculators_does(target, work, monkeypatch, layers, share):
    """The same logits and gradients as its own forward pass, whose attention has a mask over the whole batch."""
    model = student("dspark", target, layers=layers)
    batch, own = packed(work, model, 5), model.model
    torch.manual_seed(layers)
    found = blocks.chosen_blocks(batch["loss_mask"][0], batch["document_ids"][0], model.depth, share)
    assert sum(found.counts) == len(found.anchors) and sum(found.lengths) == batch["input_ids"].shape[1]
    assert 0 < len(found.anchors) <= batch["loss_mask"].sum() and (share < 1 or 0 not in found.counts)
    results = []
    hidden = blocks.hidden_states(own, batch, found)
    results.append([own.lm_head(hidden).flatten(0, 1)])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (found.anchors, torch.ones_like(found.anchors).bool()))
    own.config.transformer_layer_config._attn_implementation = "sdpa"
    _, logits, _, known, rows = own._backbone_forward(**batch, max_anchors=len(found.anchors))
    results.append([logits[0]])
    assert torch.equal(rows, found.rows.flatten()) and torch.equal(known[0], batch["loss_mask"][0, rows])
    weights = [parameter for name, parameter in own.named_parameters() if "layers" in name or name == "fc.weight"]
    for result in results:
        result += torch.autograd.grad(result[0].square().mean(), weights)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_there_is_always_a_block(target):
    for known in ([0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]):
        found = blocks.chosen_blocks(torch.tensor(known).bool(), torch.tensor([0, 0, 0, 1, 1, 1]), 4, 1e-9)
        place = known.index(1)
        assert found.rows.tolist() == [[place, place + 1, place + 2, place + 3]]
        assert found.anchors.tolist() == [place] and (found.lengths, found.counts) == ([3, 3], [1, 0])


def test_a_block_at_the_first_token_sees_itself_alone(target, work):
    model = student("dspark", target)
    batch = packed(work, model, 2)
    batch["loss_mask"] = torch.arange(batch["loss_mask"].shape[1])[None] == 0
    found = blocks.chosen_blocks(batch["loss_mask"][0], batch["document_ids"][0], model.depth, 1.0)
    hidden = blocks.hidden_states(model.model, batch, found)
    batch["hidden_states"] = torch.randn_like(batch["hidden_states"])
    torch.testing.assert_close(blocks.hidden_states(model.model, batch, found), hidden)


def test_what_a_block_learns(target, work, monkeypatch):
    """Every row of a block learns the target's probabilities of the token after its own, if it is the answer's."""
    monkeypatch.setattr(speculators_students, "SHARE", 1.0)
    monkeypatch.setattr(speculators_students, "LIKELIEST", 256)
    monkeypatch.setattr(speculators_students, "DECAY", torch.inf)
    monkeypatch.setattr(targets, "AT_ONCE", 7)
    monkeypatch.setattr(students, "found_hardware", lambda: CPU._replace(dtype=torch.float32))
    model = student("dspark", target)
    batch, own = packed(work, model, 3), model.model
    model.target.head = model.target.head.float()
    anchors = batch["loss_mask"][0].nonzero()[:, 0]
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones_like(anchors).bool()))
    loss = model(**batch)["loss"]
    own.config.transformer_layer_config._attn_implementation = "sdpa"
    _, logits, wanted, known, rows = own._backbone_forward(**batch, max_anchors=len(anchors))
    logits = logits + own.markov_head.block_bias(prev_token_ids=batch["input_ids"][:, rows], hidden_states=logits)
    expected = -(wanted.softmax(2) * logits.log_softmax(2)).sum(2)[known.bool()].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "at_once"), [(1, 8), (20, 8), (24, 8), (20, 512)])
def test_the_loss_and_its_gradients(monkeypatch, rows, at_once):
    monkeypatch.setattr(losses, "ROWS", at_once)
    torch.manual_seed(rows)
    read, head, bias = (
        torch.randn(rows, 12, requires_grad=True),
        torch.randn(40, 9),
        torch.randn(40, 3, requires_grad=True),
    )
    token_ids = torch.stack([torch.randperm(40)[:5] for _ in range(rows)])
    chances = torch.rand(rows, 5) / 5
    expected = -(chances * (read @ torch.cat([head, bias], 1).T).log_softmax(1).gather(1, token_ids)).sum()
    found = HeadLoss.apply(read, head, bias, token_ids, chances)
    results = [[value, *torch.autograd.grad(3 * value, (read, bias))] for value in (found, expected)]
    torch.testing.assert_close(*results)
