"""The optimizer of students: which part learns what, and that it resumes as if it had never stopped."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gsd.tools.distill import optimizer as optimizers
from vllm_gsd.tools.distill.optimizer import MuonAndAdamW


class Net(torch.nn.Module):
    """A matrix, an LM head and a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(8, 12)
        self.lm_head = torch.nn.Linear(12, 20, bias=False)

    def forward(self, rows):
        return self.lm_head(self.inner(rows).tanh())


class RecordDtypes(TorchDispatchMode):
    """Notes the types of all results."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.dtypes |= {tensor.dtype for tensor in [result] if isinstance(tensor, torch.Tensor)}
        return result


def learn(model, optimizer, steps):
    for step in range(steps):
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_are_muons_and_the_rest_is_adamws():
    model = Net()
    before = copy.deepcopy(model)
    learn(model, MuonAndAdamW(model, lr=0.01, weight_decay=0.0), 1)
    step = (before.inner.weight - model.inner.weight).detach()
    values = torch.linalg.svdvals(step)
    assert values.max() < 2 * values.min()  # an orthogonal matrix, roughly
    head = (before.lm_head.weight - model.lm_head.weight).detach()
    torch.testing.assert_close(head.abs(), torch.full_like(head, 0.01), rtol=1e-3, atol=0)  # AdamW's first step
    assert step.square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.3)  # as large as AdamW's usually are


def test_a_scheduler_sets_both_rates():
    model = Net()
    optimizer = MuonAndAdamW(model, lr=0.01, weight_decay=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(model.state_dict())
    learn(model, optimizer, 2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_it_resumes():
    model = Net()
    optimizer = MuonAndAdamW(model, lr=0.01, weight_decay=0.1)
    learn(model, optimizer, 3)
    again = copy.deepcopy(model)
    resumed = MuonAndAdamW(again, lr=0.5, weight_decay=0.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, own in ((model, optimizer), (again, resumed)):
        learn(net, own, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_processors_without_bfloat16_compute_in_float32(monkeypatch):
    steps = {}
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(optimizers, "CPU_DTYPE", dtype)
        model = Net()
        before = model.inner.weight.detach().clone()
        optimizer = MuonAndAdamW(model, lr=0.01, weight_decay=0.0)
        with RecordDtypes() as seen:
            learn(model, optimizer, 1)
        assert (torch.bfloat16 in seen.dtypes) == (dtype == torch.bfloat16)
        steps[dtype] = before - model.inner.weight.detach()
    torch.testing.assert_close(*steps.values(), rtol=0.05, atol=1e-4)
