"""The clock over the parts of a step, on a fake engine and with made-up seconds."""

from types import SimpleNamespace

import pytest

from vllm_gsd.tools.bench import engine, parts
from vllm_gsd.tools.bench.engine import TimedRun
from vllm_gsd.tools.bench.parts import PartsClock


class Time:
    """A clock that only moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class FakeEngine:
    """Each request takes a prefill and two more steps, which have nested parts and lose time before and after."""

    def __init__(self, clock, time):
        self.llm_engine, self.wait, self.left = self, time.wait, {}
        self.attention, self.draft, self.target, self.timed_step = (
            clock._timed(function, name, part)
            for function, name, part in (
                (lambda: self.wait(2), "forward", "attention"),
                (self._draft, "propose_draft_token_ids", "draft"),
                (self._target, "_model_forward", "target forward"),
                (self._step, "step", "other"),
            )
        )

    def add_request(self, name, prompt, params):
        self.left[name] = 3
        self.wait(30)

    def step(self):
        self.wait(1000)
        outputs = self.timed_step()
        self.wait(2000)
        return outputs

    def _step(self):
        self.wait(1)
        self.target()
        self.draft()
        self.wait(4)
        self.left = {name: left - 1 for name, left in self.left.items() if left}
        return [
            SimpleNamespace(request_id=name, finished=not left, outputs=[SimpleNamespace(token_ids=[0] * (3 - left))])
            for name, left in self.left.items()
        ]

    def _target(self):
        self.wait(8)
        self.attention()
        self.wait(16)

    def _draft(self):
        self.wait(32)
        self.attention()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_parts_add_up_to_the_steps(monkeypatch, has_gpu):
    """On GPUs, each reading waits for the operations that were started, also those from before a step."""
    time = Time()
    monkeypatch.setattr(parts, "time", time)
    monkeypatch.setattr(engine, "time", time)
    monkeypatch.setattr(parts.torch.cuda, "synchronize", lambda: time.wait(64))
    clock = PartsClock()
    clock.has_gpu = has_gpu
    for _ in range(2):  # the second run restarts the clock
        run = TimedRun(FakeEngine(clock, time), None, clock, None)
        run.answer([[1], [2]], 1)
        decode, waits = run.decode, 64 * has_gpu
        assert decode["steps"] == 4
        assert decode["parts"] == {
            "other": 4 * (1 + 4 + 3 * waits),
            "target forward": 4 * (8 + 16 + 2 * waits),
            "attention": 4 * (2 + waits),
            "draft": 4 * (32 + 2 + waits),  # attention within it is a part of it
        }
        assert decode["seconds"] == sum(decode["parts"].values())
    run = TimedRun(run.llm, None, None, None)
    run.answer([[1], [2]], 1)
    assert run.decode["seconds"] == 4 * (3000 + 1 + 8 + 2 + 16 + 32 + 2 + 4)  # without the clock, the caller's readings
