"""Names of files can't change the terminal that shows them."""

import pytest

from napari_wsigpu.model.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/a/Gewebe µm 組織.svs", "/a/Gewebe µm 組織.svs"),
        ("a\nb\r.svs", r"a\nb\r.svs"),
        ("\x1b[31mred\x9b0m", r"\x1b[31mred\x9b0m"),
        ("a\udcff\u202e.svs", r"a\udcff\u202e.svs"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
