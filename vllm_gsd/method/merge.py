"""Merging of recurring n-grams (Gong et al. 2024, section 3.2): one drafted continuation serves several places."""

from collections.abc import Iterator
from itertools import count, islice

from vllm_gsd.method.constants import MAX_CONTEXT, NONE
from vllm_gsd.method.graph import GraphBatch, children


def text_before(graphs: GraphBatch, row: int, node: int) -> Iterator[tuple[int, int]]:
    """Yield place and token of the text that ends at ``node``, backwards.

    Before the root, whose place is 0, the text continues in the committed context, with places -1, -2... Beyond the
    known context the token is NONE.
    """
    while node != NONE:
        yield node, int(graphs.token[row, node])
        node = int(graphs.parent[row, node])
    for back in count():
        yield -1 - back, int(graphs.context[row, back]) if back < MAX_CONTEXT else NONE


def same_ngram(graphs: GraphBatch, row: int, parent: int, token: int, node: int, length: int) -> bool:
    """Whether the ``length`` tokens ending in ``token`` below ``parent`` equal those ending at ``node``."""
    if graphs.token[row, node] != token:
        return False
    ours = text_before(graphs, row, parent)
    theirs = text_before(graphs, row, graphs.parent[row, node])
    for (place, ours_token), (other, theirs_token) in islice(zip(ours, theirs, strict=True), length - 1):
        if place == other:
            return True  # the paths meet here, so everything before is equal
        if ours_token != theirs_token or ours_token == NONE:
            return False
    return True


def reaches(graphs: GraphBatch, row: int, start: int, goal: int) -> bool:
    """Whether a walk down from ``start``, across merged edges too, can reach ``goal``."""
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node == goal:
            return True
        target = int(graphs.merged[row, node])
        following = children(graphs, row, node) if target == NONE else [target]
        new = [other for other in following if other not in seen]
        seen.update(new)
        waiting += new
    return False


def merge_target(graphs: GraphBatch, row: int, parent: int, token: int, length: int) -> int:
    """The native node that the candidate ``token`` below ``parent`` may continue as, or NONE.

    A node that reaches ``parent`` is refused, which keeps the graph acyclic; this includes the candidate's own path.
    The first match in drafting order wins, as its continuation is the longest drafted.
    """
    if length <= 0:
        return NONE
    for node in range(1, graphs.size[row]):
        if graphs.merged[row, node] != NONE or graphs.parent[row, node] == parent:
            continue
        if same_ngram(graphs, row, parent, token, node, length) and not reaches(graphs, row, node, parent):
            return node
    return NONE
