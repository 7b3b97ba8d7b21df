"""The numbers that the specification, the C++ of ``kernels/cpu/core`` and the device's kernels must agree on.

``setup.py`` writes them into ``kernels/cpu/core/constants.h``; the device's operations import them. The compiled
extension exports what it was built with, and is refused where that differs from this file (``host``).
"""

# Raised when an operation of the extension comes, goes, or takes or returns something else.
INTERFACE = 5

# --- token graphs -----------------------------------------------------------------------------------

NONE = -1  # no node, no token, no place

# Where a node comes from. Metrics report acceptance by origin.
ORIGIN_ROOT = 0
ORIGIN_DRAFT = 1
ORIGIN_NGRAM = 2
ORIGIN_GRAMMAR = 3
ORIGIN_SHARED = 4
ORIGIN_AGREED = 5  # drafted by the model and copied from a text
NUM_ORIGINS = 6

# How many committed tokens before the root an n-gram may reach back into.
MAX_CONTEXT = 16

# --- copies from texts ------------------------------------------------------------------------------

# Longest suffix of the text that is compared; beyond it a match is as sure as it gets.
MAX_MATCH = 16
# Chance that a copied token is right, by the number of tokens that matched before it: measured on answers of
# SmolLM2-135M (docs/LOG.md); only the ranking of hypotheses depends on it, never what is accepted. The last one is that
# of all longer matches together.
MATCH_PROB = (
    *(0.0, 0.2, 0.5, 0.58, 0.67, 0.74, 0.78, 0.81, 0.84),
    *(0.87, 0.88, 0.89, 0.9, 0.91, 0.92, 0.93, 0.97),
)

# --- calibration ------------------------------------------------------------------------------------

# Sources of nodes, as calibration tells them apart.
NATIVE, MERGED, NGRAM, SHARED, AGREED = 0, 1, 2, 3, 4
NUM_SOURCES = 5
NUM_DEPTHS = 3  # 1, 2, deeper
NUM_BINS = 8  # survival above 1/2, above 1/4, ... and all of 1/128 and less
# Weight of "survival is right" against observations, in promised nodes.
PRIOR = 1.0
# Observations are forgotten over some 500 steps, so that a cell that is no longer verified is tried again.
KEEP = 0.998

# Weight of "as calibrated" against what was observed in one request, in nodes' worth of chances.
OWN_PRIOR = 3.0
# Observations in a request are forgotten over some 30 steps with graphs, so that a source that is off is tried again.
OWN_KEEP = 0.97
# A source whose nodes come true less often than this share of what calibration says is switched off for the request.
OFF_BELOW = 0.35

# --- outcome and overhead ---------------------------------------------------------------------------

# Places of ``tally``'s counts; accepted nodes of source s are at ACCEPTED + s.
VERIFIED, MOVED, GRAMMAR, ACCEPTED = 0, 1, 2, 3

# How much an observation of a step's time still counts after the next one: about the last 100 are known.
KEPT = 0.99
