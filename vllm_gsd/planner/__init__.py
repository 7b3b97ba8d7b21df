"""Planning of how much to draft and verify in a step, batch-wide, from measured costs and observed acceptance."""
