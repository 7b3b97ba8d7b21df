"""How much to draft and to verify in a step, for the whole batch, from measured costs and observed acceptance."""
