"""Drafting: from the requests of a batch to hypotheses in their token graphs.

- ``batch`` is what a runner gives. ``drafter`` says what all drafters do; ``level_drafter`` drafts level by level, and
  ``block_drafter`` whole blocks, whose candidates ``block_heads`` scores.
- ``model`` loads and runs the draft model, with a ``trimmed_head`` if it drafts some of the tokens only.
- ``text_kv`` reads text with heads of one layer, whose keys and values suffice.
- ``kv_validity`` tracks for which tokens there is draft KV. ``limits`` bounds how much is drafted and caught up on.
- Of the target's hidden states, ``features`` stores those that EAGLE drafts read, ``context_kv`` turns those that
  blocks read into draft KV, and ``aux_states`` says from which layers they come.
- ``copies`` finds hypotheses without a draft model; ``shared_suffixes`` those in other requests' responses.
"""
