"""The draft reads committed text: every token once, in order, with a limited number of rows per forward."""

import numpy as np
import pytest

from vllm_gsd.method.text_rows import next_rows, text_rows


@pytest.mark.parametrize("most", [1, 3, 64, 1000])
@pytest.mark.parametrize("done", [[0], [5, 0, 9], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("missing", [[7, 0, 70, 1], [0, 0, 0, 0], [1, 2, -3, 130]], ids=str)
def test_every_token_is_run_once(most, done, missing):
    done = np.array(done, np.int64)
    due = done + np.array(missing[: len(done)], np.int64)
    texts = np.arange(4 * 200, dtype=np.int32).reshape(4, 200)
    lines, counts, start = np.arange(len(done))[::-1].copy(), np.empty(len(done), np.int64), done.copy()
    run = [[] for _ in done]
    forwards = 0
    while total := next_rows(done, due, most, counts):
        assert total == counts.sum() <= most
        token, position, request = (np.empty(total, np.int64) for _ in range(3))
        text_rows(done, counts, texts, lines, token, position, request)
        for row, at in zip(request, position, strict=True):
            run[row].append(at)
        assert token.tolist() == texts[lines[request], position].tolist()
        done += counts
        forwards += 1
    assert run == [list(range(first, last)) for first, last in zip(start, due, strict=True)]
    assert forwards == -(-np.maximum(due - start, 0).sum() // most)  # only the last one had room left
