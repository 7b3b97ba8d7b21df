"""The draft KV that the tracker claims, compared with a model that knows the content of every physical slot.

The model simulates vLLM's block manager (prefix cache, shared and reused blocks, preemption, chunked prefill) and the
draft model (catching up, writing drafted nodes after the text). The tests check two properties. The tracker never
claims a slot unless it holds the draft KV of exactly the request's text up to there. A request that starts or resumes
gets credit for all leading draft KV in its cached blocks.
"""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_gsd.engine.draft.kv_validity import DraftKVTracker

# --- scenarios --------------------------------------------------------------------------------------


def tracker_with(block_size=4, num_blocks=16):
    return DraftKVTracker(num_blocks, block_size)


def test_a_new_request_has_none():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5], 0)])
    assert tracker.length["a"] == 0


def test_what_was_drafted_is_there():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5], 0)])
    tracker.advance("a", 6)
    assert tracker.length["a"] == 6
    tracker.extend("a", [7])
    tracker.advance("a", 9)
    assert tracker.length["a"] == 9


def test_a_row_that_read_the_token_after_a_hit_is_computed_again():
    """If rows also read the next token (EAGLE-3), the last row of a hit was computed with another text's token."""
    tracker = DraftKVTracker(16, 4, shift=1)
    tracker.admit([("a", [3, 5, 6], 0)])
    tracker.advance("a", 11)
    tracker.admit([("b", [3, 5, 8], 8), ("c", [7], 0)])
    assert (tracker.length["b"], tracker.length["c"]) == (7, 0)
    tracker.admit([("d", [3, 5, 6, 9], 12)])
    assert tracker.length["d"] == 11


def test_a_prefix_hit_takes_over_whole_blocks():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5, 6], 0)])
    tracker.advance("a", 12)
    tracker.admit([("b", [3, 5, 8], 8)])
    assert tracker.length["b"] == 8
    # b's new block belongs to b alone.
    tracker.advance("b", 10)
    assert (tracker.length["a"], tracker.length["b"]) == (12, 10)


def test_requests_that_start_together_share_what_one_of_them_reads():
    """They share blocks that one of them has yet to fill."""
    tracker = DraftKVTracker(16, 4, shift=1)
    tracker.admit([("a", [3, 5, 6], 0), ("b", [3, 5, 8], 8), ("c", [3, 5, 9], 8)])
    assert tracker.lengths(["a", "b", "c"]).tolist() == [0, 0, 0]
    tracker.advance("b", 6)
    assert tracker.lengths(["a", "b", "c"]).tolist() == [0, 6, 6]
    tracker.advance("a", 11)
    assert tracker.lengths(["a", "b", "c"]).tolist() == [11, 7, 7]
    tracker.advance("c", 11)
    assert tracker.lengths(["b"]).tolist() == [7]


def test_a_prefix_hit_on_blocks_the_draft_never_ran_over():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5], 0)])  # speculation was off: no advance
    tracker.admit([("b", [3, 5, 6], 8)])
    assert tracker.length["b"] == 0
    tracker.advance("b", 12)
    tracker.admit([("c", [3, 5, 7], 8)])
    assert tracker.length["c"] == 8


def test_a_prefix_hit_stops_at_the_first_gap():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5, 6], 0)])
    tracker.advance("a", 6)  # the second block is half valid
    tracker.remove("a")
    tracker.admit([("b", [3, 5, 6, 7], 12)])
    assert tracker.length["b"] == 6


def test_a_hole_in_the_middle_ends_the_claim():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5, 6], 0)])
    tracker.advance("a", 12)
    tracker.remove("a")
    # Block 5 was evicted and recomputed without the draft; 3 and 6 are unchanged.
    tracker.admit([("other", [5], 0)])
    tracker.remove("other")
    tracker.admit([("b", [3, 5, 6, 7], 12)])
    assert tracker.length["b"] == 4


def test_a_block_that_is_used_again_is_empty():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5], 0)])
    tracker.advance("a", 8)
    tracker.remove("a")
    tracker.admit([("b", [5, 3], 0)])
    assert tracker.length["b"] == 0
    tracker.remove("b")
    tracker.admit([("c", [9], 0)])
    tracker.extend("c", [5])
    tracker.remove("c")
    tracker.admit([("d", [9, 5], 8)])
    assert tracker.length["d"] == 0


def test_a_resumed_request_starts_anew():
    tracker = tracker_with()
    tracker.admit([("a", [3, 5, 6], 0)])
    tracker.advance("a", 11)
    # a is preempted, and block 6 is given to another request. Blocks 3 and 5 are still cached.
    tracker.admit([("b", [6], 0)])
    tracker.admit([("a", [3, 5, 7], 8)])
    assert tracker.length["a"] == 8
    assert tracker.blocks["a"] == [3, 5, 7]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_advances_in_pieces(block_size):
    tracker = tracker_with(block_size, 40)
    blocks = list(range(36, 0, -1))
    tracker.admit([("a", blocks, 0)])
    for length in (1, 2, 5, 6, 7, 16, 17, 33):
        tracker.advance("a", length)
        cached = length // block_size * block_size
        tracker.admit([("b", [*blocks[: length // block_size], 0], cached)])
        assert tracker.length["b"] == cached


def test_removing_an_unknown_request():
    tracker = tracker_with()
    before = dict(tracker.length), dict(tracker.blocks)
    tracker.remove("nobody")
    assert (tracker.length, tracker.blocks) == before


# --- the scheduler's output -------------------------------------------------------------------------


def scheduled(finished=(), new=(), running=(), resumed=()):
    """The fields of SchedulerOutput that the tracker reads.

    Args:
        finished: names of requests.
        new: (request, blocks, cached tokens).
        running: (request, new blocks or None).
        resumed: as for ``new``.
    """
    cached = [(r, None if b is None else (b,), 0) for r, b in running] + [(r, (b,), n) for r, b, n in resumed]
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=n) for r, b, n in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _, _ in cached],
            new_block_ids=[b for _, b, _ in cached],
            num_computed_tokens=[n for _, _, n in cached],
            resumed_req_ids={r for r, _, _ in resumed},
        ),
    )


def test_update_follows_the_scheduler():
    tracker = tracker_with()
    tracker.update(scheduled(new=[("a", [1, 2], 0), ("b", [3], 0)]))
    tracker.advance("a", 8)
    tracker.advance("b", 3)
    tracker.update(scheduled(running=[("a", [4]), ("b", None)]))
    assert tracker.blocks == {"a": [1, 2, 4], "b": [3]}
    assert tracker.length == {"a": 8, "b": 3}
    tracker.update(scheduled(finished=["b"], new=[("c", [1, 2, 3], 8)], running=[("a", None)]))
    assert tracker.length == {"a": 8, "c": 8}
    # a is preempted, which the tracker does not see, and resumes with one of its blocks still cached.
    tracker.update(scheduled(running=[("c", None)]))
    tracker.update(scheduled(running=[("c", None)], resumed=[("a", [1, 6], 4)]))
    assert tracker.length == {"a": 4, "c": 8}
    assert tracker.blocks["a"] == [1, 6]


def test_a_finished_request_s_blocks_are_reused_in_the_same_step():
    tracker = tracker_with()
    tracker.update(scheduled(new=[("a", [1, 2], 0)]))
    tracker.advance("a", 8)
    tracker.update(scheduled(finished=["a"], new=[("b", [2, 1], 0)]))
    assert tracker.length == {"b": 0}


def test_two_new_requests_share_fresh_blocks_in_one_step():
    # vLLM caches a block as soon as it allocates it, so b finds a's blocks in the step that fills them.
    tracker = tracker_with()
    tracker.update(scheduled(new=[("old", [1, 2], 0)]))
    tracker.advance("old", 8)
    tracker.update(scheduled(finished=["old"], new=[("a", [1, 2, 3], 0), ("b", [1, 2, 4], 8)]))
    assert tracker.length == {"a": 0, "b": 0}


def test_a_new_request_shares_a_running_request_s_fresh_block():
    # a's prompt is prefilled in chunks; b has the same prompt and starts in the step in which a gets block 2.
    tracker = tracker_with()
    tracker.update(scheduled(new=[("old", [2], 0)]))
    tracker.advance("old", 4)
    tracker.update(scheduled(finished=["old"], new=[("a", [1], 0)]))
    tracker.advance("a", 4)
    tracker.update(scheduled(running=[("a", [2])], new=[("b", [1, 2, 3], 8)]))
    assert tracker.length["b"] == 4  # block 2 holds draft KV of old's text


def test_a_new_request_shares_a_resumed_request_s_fresh_block():
    tracker = tracker_with()
    tracker.update(scheduled(new=[("old", [2], 0), ("a", [1], 0)]))
    tracker.advance("old", 4)
    tracker.update(scheduled(finished=["old"], resumed=[("a", [2, 4], 0)], new=[("b", [2, 3], 4)]))
    assert tracker.length["b"] == 0


# --- the state machine ------------------------------------------------------------------------------

# Prompts with common prefixes, so that the prefix cache is hit.
PROMPTS = st.builds(
    lambda first, branch, length: ([first] * branch + [1, 0, 0, 1] * 4)[:length],
    st.integers(0, 1),
    st.sampled_from([0, 4, 9]),
    st.integers(2, 14),
)


class Request:
    def __init__(self, tokens):
        self.tokens = tokens
        self.blocks: list[int] = []
        self.known = 0  # leading tokens whose target KV is computed or scheduled


class World(RuleBasedStateMachine):
    """Simulates vLLM's block manager and a draft model, and records the content of every slot of the draft's cache."""

    in_pieces = False  # whether the draft may stop before it has caught up

    @initialize(block_size=st.sampled_from([2, 3, 4, 1]), num_blocks=st.integers(16, 24))
    def start(self, block_size, num_blocks):
        self.size = block_size
        self.tracker = DraftKVTracker(num_blocks, block_size)
        self.content: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self.owners = dict.fromkeys(range(num_blocks), 0)
        self.cached: dict[tuple[int, ...], int] = {}  # text up to a block's end -> block
        self.running: dict[str, Request] = {}
        self.preempted: dict[str, Request] = {}
        self.names = 0

    # --- helpers

    def take(self, count, choice):
        """Allocate free blocks in an arbitrary order and clear their content."""
        free = sorted(block for block, owners in self.owners.items() if owners == 0)
        if len(free) < count:
            return None
        shift = choice % max(1, len(free))
        fresh = (free[shift:] + free[:shift])[:count]
        for block in fresh:
            self.owners[block] = 1
            self.cached = {text: b for text, b in self.cached.items() if b != block}
            for offset in range(self.size):
                self.content[block, offset] = None
        return fresh

    def blocks_for(self, tokens, lookahead):
        return -(-(tokens + lookahead) // self.size)

    def cache_full_blocks(self, request):
        for index in range(request.known // self.size):
            self.cached.setdefault(tuple(request.tokens[: (index + 1) * self.size]), request.blocks[index])

    def num_drafted(self, request):
        """The number of leading tokens of a request whose slots hold exactly their draft KV."""
        for position in range(len(request.tokens)):
            block = position // self.size
            if block >= len(request.blocks):
                return position
            slot = request.blocks[block], position % self.size
            if self.content.get(slot) != tuple(request.tokens[: position + 1]):
                return position
        return len(request.tokens)

    def begin(self, name, request, chunk, lookahead, choice):
        hits = []
        for index in range((len(request.tokens) - 1) // self.size):
            block = self.cached.get(tuple(request.tokens[: (index + 1) * self.size]))
            if block is None:
                break
            hits.append(block)
        for block in hits:
            self.owners[block] += 1
        known = min(len(request.tokens), len(hits) * self.size + chunk)
        fresh = self.take(self.blocks_for(known, lookahead) - len(hits), choice)
        if fresh is None:
            for block in hits:
                self.owners[block] -= 1
            return False
        request.blocks, request.known = hits + fresh, known
        self.tracker.admit([(name, list(request.blocks), len(hits) * self.size)])
        self.running[name] = request
        self.cache_full_blocks(request)
        if not self.in_pieces:
            assert self.tracker.length[name] == self.num_drafted(request)
        return True

    def release(self, request):
        for block in request.blocks:
            self.owners[block] -= 1
        request.blocks, request.known = [], 0

    def pick(self, choice):
        return sorted(self.running)[choice % len(self.running)]

    # --- events

    @rule(tokens=PROMPTS, chunk=st.sampled_from([14, 3, 1, 8]), lookahead=st.integers(0, 5), choice=st.integers(0, 15))
    def admit(self, tokens, chunk, lookahead, choice):
        self.names += 1
        self.begin(f"r{self.names}", Request(tokens), chunk, lookahead, choice)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 15), chunk=st.integers(1, 14), lookahead=st.integers(0, 5))
    def admit_the_same_text(self, choice, chunk, lookahead):
        text = self.running[self.pick(choice)].tokens
        self.names += 1
        self.begin(f"r{self.names}", Request([*text, 0]), chunk, lookahead, choice)

    @precondition(lambda self: self.running)
    @rule(
        choice=st.integers(0, 15), new=st.lists(st.integers(0, 1), min_size=1, max_size=4), lookahead=st.integers(0, 5)
    )
    def step(self, choice, new, lookahead):
        """The target continues with the next chunk of the prompt or with accepted tokens."""
        name = self.pick(choice)
        request = self.running[name]
        unfinished = request.known < len(request.tokens)
        known = min(len(request.tokens), request.known + len(new)) if unfinished else request.known + len(new)
        fresh = self.take(max(0, self.blocks_for(known, lookahead) - len(request.blocks)), choice)
        if fresh is None:
            return
        if not unfinished:
            request.tokens = request.tokens + new
        request.blocks += fresh
        request.known = known
        if fresh:
            self.tracker.extend(name, fresh)
        self.cache_full_blocks(request)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 15), pieces=st.lists(st.integers(1, 6), max_size=3), nodes=st.integers(0, 5))
    def draft(self, choice, pieces, nodes):
        """The draft catches up in one or more forwards, then writes drafted nodes after the text."""
        name = self.pick(choice)
        request = self.running[name]
        length = self.tracker.length[name]
        stops = []
        for piece in pieces:
            stops.append(min(request.known, (stops or [length])[-1] + piece))
        if not self.in_pieces or not stops:
            stops.append(request.known)
        for stop in stops:
            if stop <= length:
                continue
            for position in range(length, stop):
                slot = request.blocks[position // self.size], position % self.size
                self.content[slot] = tuple(request.tokens[: position + 1])
            self.tracker.advance(name, stop)
            length = stop
            assert self.tracker.length[name] == stop
        if length == request.known:
            for position in range(length, length + nodes):
                if position // self.size < len(request.blocks):
                    self.content[request.blocks[position // self.size], position % self.size] = None

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 15))
    def finish(self, choice):
        name = self.pick(choice)
        self.release(self.running.pop(name))
        self.tracker.remove(name)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 15))
    def preempt(self, choice):
        name = self.pick(choice)
        self.preempted[name] = self.running.pop(name)
        self.release(self.preempted[name])

    @precondition(lambda self: self.preempted)
    @rule(choice=st.integers(0, 15), chunk=st.integers(1, 14), lookahead=st.integers(0, 5))
    def resume(self, choice, chunk, lookahead):
        name = sorted(self.preempted)[choice % len(self.preempted)]
        if self.begin(name, self.preempted[name], chunk, lookahead, choice):
            del self.preempted[name]

    @rule()
    def forget_prefixes(self):
        self.cached.clear()

    # --- invariants

    @invariant()
    def claims_nothing_that_is_not_there(self):
        for name, request in getattr(self, "running", {}).items():
            assert self.tracker.length[name] <= self.num_drafted(request)
            assert self.tracker.blocks[name] == request.blocks


class WorldInPieces(World):
    """The draft may also stop in the middle of a prefix that other requests share."""

    in_pieces = True


TestWorld = World.TestCase
TestWorldInPieces = WorldInPieces.TestCase
TestWorld.settings = TestWorldInPieces.settings = settings(
    derandomize=True, deadline=None, max_examples=80, stateful_step_count=40
)
