import pytest

from napari_wsigpu.formats import markup
from napari_wsigpu.model.limits import limits


@pytest.mark.parametrize(
    "xml",
    [
        None,
        "",
        "<a>",
        "text",
        "<a>\0</a>",
        '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><x>&b;</x>',
        '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/hostname">]><x>&a;</x>',
    ],
)
def test_invalid_or_hostile_xml(xml):
    assert markup.parse(xml) is None


def test_too_long_xml():
    assert markup.parse(f'<a b="{"x" * limits.xml_bytes}"/>') is None


def test_too_many_elements(monkeypatch):
    monkeypatch.setattr(limits, "xml_elements", 5)
    assert markup.parse(f"<a>{'<b></b>' * 4}</a>") is not None
    assert markup.parse(f"<a>{'<b></b>' * 5}</a>") is None
    assert markup.parse(f"<a>{'<b/>' * 5}</a>") is None


@pytest.mark.parametrize(
    ("xml", "expected"),
    [
        ("<a/>", ""),
        ("<a> b </a>", "b"),
        ('<?xml version="1.0" encoding="utf-16"?><a>\xb5</a>', "\xb5"),
        ('<a b="1"/>', {"b": "1"}),
        ('<a b="1">c</a>', {"b": "1", "text": "c"}),
        ("<a><b>1</b><b>2</b><c/></a>", {"b": ["1", "2"], "c": ""}),
        ('<a b="1"><b>2</b></a>', {"b": ["1", "2"]}),
        ('<n:a xmlns:n="u" n:b="1"><n:c>2</n:c></n:a>', {"b": "1", "c": "2"}),
    ],
)
def test_nested(xml, expected):
    assert markup.nested(markup.parse(xml)) == expected


def test_too_deep_values_are_left_out():
    found = markup.nested(markup.parse("<a>" * 100_000 + "</a>" * 100_000))
    depth = 0
    while found:
        found, depth = found.get("a"), depth + 1
    assert depth == markup.DEEPEST


def test_texts_of_children():
    root = markup.parse('<a xmlns="u"><b> 1 </b><b>2</b><c/></a>')
    assert markup.text(root, "b") == "1"
    assert markup.text(root, "c") is None
    assert markup.text(root, "d") is None
    assert markup.text(None, "b") is None
    assert len(list(markup.children(root, "b"))) == 2
