"""A tree's picture: places by hand, well-formed SVG, texts that cannot leave it, and DOT."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from test_tree import grown_trees, hand_tree

from yggdrasil.errors import ConfigError
from yggdrasil.picture import Picture
from yggdrasil.tree import TokenTree

SVG = "{http://www.w3.org/2000/svg}"


def groups(svg: str) -> dict[str, tuple[str, float, float]]:
    """Of every text its node's class, and where it is."""
    found = {}
    for group in ElementTree.fromstring(svg).findall(f"{SVG}g"):
        text = group.find(f"{SVG}text")
        assert text is not None
        assert text.text is not None
        found[text.text] = (group.attrib["class"], float(text.attrib["x"]), float(text.attrib["y"]))
    return found


def test_the_first_child_is_on_its_parent_s_line_and_every_leaf_has_a_line() -> None:
    """0 -> 1 -> 3 -> 5, 0 -> 2, 1 -> 4."""
    assert hand_tree().picture().lines() == [0, 0, 2, 0, 1, 0]


def test_the_likelier_child_comes_first_whatever_its_id() -> None:
    tree = TokenTree.root(9, 3)
    tree.grow([0, 0], [11, 12], [-2.0, -0.5])
    assert tree.picture().lines() == [0, 1, 0]


def test_accepted_rejected_and_pruned_nodes_and_the_bonus_look_different() -> None:
    svg = hand_tree().to_svg(marked=[0, 1], kept=[0, 1, 2, 3], bonus="99")
    assert {text: kind for text, (kind, _, _) in groups(svg).items()} == {
        "9": "accepted",
        "11": "accepted",
        "12": "rejected",
        "21": "rejected",
        "22": "pruned",
        "31": "pruned",
        "99": "bonus",
    }


def test_a_child_is_right_of_its_parent_and_the_bonus_on_the_path_s_line() -> None:
    found = groups(hand_tree().to_svg(marked=[0, 1], bonus="99"))
    assert found["9"][1] < found["11"][1] < found["99"][1]
    assert found["9"][2] == found["11"][2] == found["99"][2] < found["21"][2]


def test_a_text_cannot_leave_its_node() -> None:
    tree = TokenTree.root(9, 2)
    tree.grow([0], [11], [-0.5])
    svg = tree.to_svg(["</text><script>", "a  &b"])
    assert set(groups(svg)) == {"</text><script>", "a\u00a0\u00a0&b"}
    assert "<script" not in svg


@given(tree=grown_trees())
@settings(max_examples=40, deadline=None)
def test_no_two_nodes_of_any_tree_overlap_and_all_are_in_the_picture(tree: TokenTree) -> None:
    image = ElementTree.fromstring(tree.to_svg())
    boxes = [box.attrib for box in image.iter(f"{SVG}rect")]
    edges = [tuple(float(box[name]) for name in ("x", "y", "width", "height")) for box in boxes]
    assert len(edges) == len(tree)
    for place, (x, y, width, height) in enumerate(edges):
        assert x + width <= float(image.attrib["width"])
        assert y + height <= float(image.attrib["height"])
        for left, top, other, _ in edges[:place]:
            assert abs(top - y) >= height or left + other <= x or x + width <= left


def test_the_picture_has_colours_for_dark_pages_and_loads_nothing() -> None:
    svg = hand_tree().to_svg()
    assert "prefers-color-scheme:dark" in svg
    assert re.findall('https?://[^"]*', svg) == ["http://www.w3.org/2000/svg"]


def test_a_notebook_shows_a_tree_and_an_svg() -> None:
    tree = hand_tree()
    assert tree._repr_svg_() == tree.to_svg() == tree.to_svg()._repr_svg_()


def test_dot_has_every_node_and_edge_and_quotes_texts() -> None:
    tree = TokenTree.root(9, 3)
    tree.grow([0, 0], [11, 12], [-0.5, -1.0])
    lines = tree.to_dot(["root", 'a "b"\\', "c"], [0, 1]).splitlines()
    assert '  1 [label="a \\"b\\"\\\\" style=filled fillcolor="#166534" fontcolor=white]' in lines
    assert [line for line in lines if "->" in line] == ["  0 -> 1", "  0 -> 2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"label": ["a"]}, "length of label"), ({"marked": [6]}, "marked"), ({"kept": [-1]}, "kept")],
)
def test_labels_and_nodes_that_do_not_fit_the_tree_are_refused(
    options: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hand_tree().to_svg(**options)  # type: ignore[arg-type]


def test_wide_letters_get_wide_nodes() -> None:
    narrow, wide = (
        Picture([-1], [text], [""], [0.0]).svg().partition('width="')[2].partition('"')[0]
        for text in ("ab", "日本")
    )
    assert int(wide) > int(narrow)
