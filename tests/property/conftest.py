"""Lets the property tests import ``reference_graph``, the model with which they compare the specification."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
