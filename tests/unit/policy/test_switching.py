"""The table of times to bring the draft back."""

from __future__ import annotations

import pytest

from yggdrasil.bundle import Bundle
from yggdrasil.loading import load_bundle
from yggdrasil.pair import load_measurements
from yggdrasil.policy.switching import SwitchTable

TABLE = SwitchTable(lags=(2, 10, 100), batch_sizes=(1, 4), seconds=((0.1, 0.4), (0.2, 0.8), (1.0, 4.0)))


@pytest.mark.parametrize(
    ("lag", "batch_size", "seconds"),
    (
        (2, 1, 0.1),
        (10, 4, 0.8),
        (6, 1, 0.15),  # halfway between lags
        (2, 3, 0.3),  # two thirds between batch sizes
        (55, 2, 1.2),  # a third of the way from 0.6 to 2.4: both at once
        (1000, 4, 40.0),  # more than was measured: in proportion
        (100, 64, 64.0),
        (200, 2, 4.0),
        (1, 1, 0.05),  # less than was measured: in proportion
        (0, 4, 0.0),
    ),
)
def test_costs_between_measured_points_are_linear(lag: int, batch_size: int, seconds: float) -> None:
    assert TABLE(lag, batch_size) == pytest.approx(seconds)


def test_the_table_survives_json() -> None:
    assert SwitchTable.from_json(TABLE.to_json()) == TABLE


def test_a_compiled_pair_has_a_measured_table(tiny_bundle: Bundle) -> None:
    table = load_measurements(load_bundle(tiny_bundle.name), tiny_bundle.dataset).switching
    assert table.lags == (2, 16, 64, 255)
    assert table.batch_sizes == (1, 2, 4, 8, 16)
    assert table(255, 16) > table(2, 1) > 0  # 4080 tokens and 2
