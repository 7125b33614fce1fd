"""Fixtures of the commands."""

from __future__ import annotations

import pytest

from yggdrasil.api import Pair, load_pair
from yggdrasil.bundle import Bundle


@pytest.fixture(scope="module")
def pair(tiny_bundle: Bundle) -> Pair:
    return load_pair(tiny_bundle.name)
