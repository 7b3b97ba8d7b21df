"""Constants that the specification, the C++ of ``kernels/cpu/core`` and the device's kernels share.

``setup.py`` writes them into ``kernels/cpu/core/constants.h``, and the device's operators import them. The compiled
extension exports the values it was built with; ``host`` refuses it if they differ from this file.
"""

# Increment this when the extension's operations, or what they take or return, change.
INTERFACE = 8

# --- token graphs -----------------------------------------------------------------------------------

NONE = -1  # no node, no token, no place

# Where a node comes from.
ORIGIN_ROOT = 0
ORIGIN_DRAFT = 1
ORIGIN_NGRAM = 2
ORIGIN_GRAMMAR = 3
ORIGIN_SHARED = 4
ORIGIN_AGREED = 5  # drafted by the model and copied from a text
NUM_ORIGINS = 6

# Number of committed tokens before the root that n-grams may include.
MAX_CONTEXT = 16

# --- copies from texts ------------------------------------------------------------------------------

# Length of the longest suffix that is compared; longer matches count as equally sure.
MAX_MATCH = 16
# Probability that a copied token is right, by the number of tokens that matched before it; the last entry covers all
# longer matches. Measured on answers of SmolLM2-135M
# (docs/experiments/2026-11-22-07-more-varied-answers-for-the-draft-wider.md). Only the ranking of hypotheses depends on
# it, never which tokens are accepted.
MATCH_PROB = (*(0.0, 0.2, 0.5, 0.58, 0.67, 0.74, 0.78, 0.81, 0.84), *(0.87, 0.88, 0.89, 0.9, 0.91, 0.92, 0.93, 0.97))

# --- calibration ------------------------------------------------------------------------------------

# Sources of nodes that calibration distinguishes.
NATIVE, MERGED, NGRAM, SHARED, AGREED = 0, 1, 2, 3, 4
NUM_SOURCES = 5
NUM_DEPTHS = 3  # 1, 2, deeper
NUM_BINS = 8  # survival above 1/2, above 1/4, ..., and at most 1/128
# Weight of the prior "survival is right", in promised nodes.
PRIOR = 1.0
# Observations fade over about 500 steps, so that a cell that is no longer verified is tried again.
KEEP = 0.998

# Weight of the prior "as calibrated" within one request, in promised nodes. It is large because the nodes of a copied
# chain are right or wrong together, so they tell less of a request than as many independent ones would.
OWN_PRIOR = 12.0
# Observations in a request fade over about 70 steps, so that a source that is off is tried again.
OWN_KEEP = 0.985
# A source is switched off for a request if its nodes are accepted less often than this share of the calibrated rate.
OFF_BELOW = 0.35

# --- outcome ----------------------------------------------------------------------------------------

# Indices of ``tally``'s counts; accepted nodes of source s are at ACCEPTED + s.
VERIFIED, MOVED, GRAMMAR, ACCEPTED = 0, 1, 2, 3
