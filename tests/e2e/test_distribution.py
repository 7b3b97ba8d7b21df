"""Unseeded text sampled on graphs has the same distribution as plain vLLM's (see ``distribution`` for the criterion).

``scripts/check_distribution`` runs the same check with 20,000 continuations for every setting.
"""

import pytest
from distribution import GSD, OPTIONS, SEEDS, SETTINGS, VOCAB_SIZE, check, compare, sample
from engine_process import Engine
from tiny_pair import build_tiny_pair

SAMPLES = dict.fromkeys(SETTINGS, 2000) | {"temperature 1.0": 20000}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Plain vLLM and gsd on a pair with a tiny vocabulary."""
    pair = build_tiny_pair(tmp_path_factory.mktemp("tiny_vocabulary"), VOCAB_SIZE)
    config = {"method": "gsd", "model": str(pair.draft), **GSD}
    plain = Engine(pair.target, None, seed=SEEDS["plain"], **OPTIONS)
    gsd = Engine(pair.target, config, seed=SEEDS["gsd"], **OPTIONS)
    yield plain, gsd
    plain.close()
    gsd.close()


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_graph_and_plain_differ_by_noise_only(engines, setting):
    report = check(*engines, SETTINGS[setting], SAMPLES[setting])
    assert report["within_noise"], report
    assert report["samples"] == SAMPLES[setting]
    assert report["accepted"] > 0
    assert report["tokens_per_step"] > 1.1
    assert report["fallbacks"] == 0


def test_control_a_slightly_other_temperature_is_noticed(engines):
    plain, gsd = engines
    warmer = compare(sample(plain, {}, 2000), sample(gsd, {"temperature": 1.2}, 2000))
    assert not warmer.is_noise
    assert warmer.p_value < 0.001
