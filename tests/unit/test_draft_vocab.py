"""The tokens that a draft with a trimmed vocabulary can propose."""

import json

import numpy as np
import pytest

from vllm_gsd.config import GSDConfig, GSDConfigError, check_draft_model
from vllm_gsd.config.draft_vocab import FILE, choose_draft_vocab, read_draft_vocab, write_draft_vocab

LISTED = {"token_ids": [7, 3, 90, 0]}


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        (None, None, None),
        (None, 100, None),
        (None, 3, [0, 1, 2]),  # low ids are frequent tokens
        (LISTED, None, [0, 3, 7, 90]),
        (LISTED, 2, [3, 7]),  # the most frequent ones
        (LISTED, 6, [0, 1, 2, 3, 7, 90]),  # filled up by id
        (LISTED, 100, None),
    ],
)
def test_chosen_tokens(stored, wanted, expected):
    chosen = choose_draft_vocab(stored, 100, wanted)
    assert (chosen if chosen is None else chosen.tolist()) == expected


def test_too_many():
    with pytest.raises(GSDConfigError, match='"draft_vocab_size" is 101, but must be at most 100'):
        choose_draft_vocab(None, 100, 101)


@pytest.mark.parametrize(
    "stored",
    ["damaged", [], {}, {"token_ids": []}, {"token_ids": [1, 1]}, {"token_ids": [100]}, {"token_ids": [-1]},
     {"token_ids": ["a"]}, {"token_ids": [[1], [2]]}, {"token_ids": 5}, {"token_ids": [0.5]}, {"token_ids": [[1], 2]}],
    ids=str,
)  # fmt: skip
def test_damaged_lists_are_refused(stored):
    with pytest.raises(GSDConfigError, match=r"draft_vocab\.json"):
        choose_draft_vocab(stored, 100, None)


def test_file(tmp_path):
    assert read_draft_vocab(tmp_path) is None
    write_draft_vocab(tmp_path, np.array(LISTED["token_ids"]))
    assert read_draft_vocab(tmp_path) == LISTED
    (tmp_path / FILE).write_text("{")
    assert read_draft_vocab(tmp_path) == "damaged"


def test_refused_before_weights_are_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    config = {"method": "gsd", "model": str(tmp_path)}
    check_draft_model(GSDConfig.load({**config, "draft_vocab_size": 50}), 100)
    with pytest.raises(GSDConfigError, match="is 101"):
        check_draft_model(GSDConfig.load({**config, "draft_vocab_size": 101}), 100)
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(GSDConfigError, match=r"draft_vocab\.json"):
        check_draft_model(GSDConfig.load(config), 100)
