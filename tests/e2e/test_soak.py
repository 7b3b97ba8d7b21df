"""A soak test of half a minute; ``scripts/soak`` runs longer ones."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from soaking.run import soak
from soaking.server import Setting


@pytest.mark.slow
def test_half_a_minute(tmp_path):
    report = soak(Setting("v1", 24), 25, seed=0, folder=tmp_path)
    assert report["passed"], (report["checks"], report["failures"][:5])
    assert report["requests"]["all"]["ended"]["answered"] > 20
    assert max(reading["tracked"] for reading in report["series"]) > 1  # the gauge works
