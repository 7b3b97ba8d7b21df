"""Lets the tests here import ``reference_graph``, the model they compare the core with."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
