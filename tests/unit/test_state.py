"""Shapes of a step that can be, and those that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from yggdrasil.errors import ConfigError
from yggdrasil.state import PLAIN, Shape


@pytest.mark.parametrize(
    ("width", "depth", "complaint"),
    [
        (-1, 2, "width: -1 is not allowed; it must be a whole number, at least 1"),
        (0, 4, "width: 0 is not allowed"),
        (1.5, 2, "width: 1.5 is not allowed"),
        (4, -1, "depth: -1 is not allowed; it must be a whole number, at least 0"),
        (4, None, "depth: None is not allowed"),
    ],
)
def test_a_shape_without_nodes_or_of_negative_depth_is_refused(
    width: Any, depth: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Shape(width, depth)


@pytest.mark.parametrize("verify", (0, -1, 2.5, "8"))
def test_a_shape_that_verifies_no_node_is_refused(verify: Any) -> None:
    with pytest.raises(ConfigError, match=f"verify: {verify!r} is not allowed; it must be a whole number"):
        Shape(4, 4, verify)


def test_a_shape_shows_the_call_that_makes_it() -> None:
    for shape in (Shape(4, 5), Shape(4, 5, 16, graft=3), Shape(2, 1, levels=(((0, 0), (0, 2)),)), PLAIN):
        assert eval(repr(shape)) == shape
    assert repr(Shape(4, 5)) == "Shape(width=4, depth=5)"


def test_the_smallest_shape_is_the_root_alone() -> None:
    assert Shape(1, 0).num_nodes == 1
