"""Metadata as a tree."""

import json

import pytest
from qtpy.QtCore import Qt

from napari_wsigpu.widgets.kit.metadata_model import MOST_ROWS, MetadataModel, fields_of

NESTED = {
    "vendor": "philips",
    "objective": None,
    "philips": {
        "Rows": 512,
        "Images": [
            {"Type": "WSI", "Levels": [{"Number": 0}, {"Number": 1}]},
            {"Type": "LABELIMAGE", "Empty": ""},
        ],
        "Spacing": [0.25, 0.25],
    },
    "tiff": {"Software": "maker <b>1</b>"},
}


def show(model, metadata):
    model.fields = fields_of(metadata)
    model.search("")


@pytest.fixture
def model(display):
    made = MetadataModel()
    show(made, NESTED)
    return made


def paths(model):
    """Paths of all rows that are shown, groups included."""
    found, waiting = [], [model.index(row, 0) for row in range(model.rowCount())]
    while waiting:
        index = waiting.pop(0)
        found.append(model.path(index))
        waiting[:0] = [model.index(row, 0, index) for row in range(model.rowCount(index))]
    return found


def row(model, path):
    waiting = [model.index(row, 0) for row in range(model.rowCount())]
    while waiting:
        index = waiting.pop()
        if model.path(index) == path:
            return index
        waiting += [model.index(row, 0, index) for row in range(model.rowCount(index))]
    raise KeyError(path)


def test_every_leaf_has_its_path(model):
    assert paths(model) == [
        "vendor",
        "objective",
        "philips",
        "philips.Rows",
        "philips.Images",
        "philips.Images[0]",
        "philips.Images[0].Type",
        "philips.Images[0].Levels",
        "philips.Images[0].Levels[0]",
        "philips.Images[0].Levels[0].Number",
        "philips.Images[0].Levels[1]",
        "philips.Images[0].Levels[1].Number",
        "philips.Images[1]",
        "philips.Images[1].Type",
        "philips.Images[1].Empty",
        "philips.Spacing",
        "tiff",
        "tiff.Software",
    ]


def test_values_are_whole(model):
    assert model.value(row(model, "vendor")) == "philips"
    assert model.value(row(model, "objective")) == ""
    assert model.value(row(model, "philips.Rows")) == "512"
    images = json.loads(model.value(row(model, "philips.Images")))
    assert images == NESTED["philips"]["Images"]


def test_search_finds_names_and_values_and_keeps_parents(model):
    model.search("labelimage")
    assert paths(model) == [
        "philips",
        "philips.Images",
        "philips.Images[1]",
        "philips.Images[1].Type",
    ]
    model.search("SOFT")
    assert paths(model) == ["tiff", "tiff.Software"]
    model.search("no such thing")
    assert paths(model) == []


def test_a_found_group_stays_whole(model):
    model.search("levels")
    assert "philips.Images[0].Levels[1].Number" in paths(model)


def test_long_values_are_shortened_in_the_tree_alone(display):
    model = MetadataModel()
    long = "line\n" * 200_000 + "needle"
    show(model, {"x" * 1000: long})
    index = model.index(0, 0)
    assert len(index.data()) < 310
    assert len(index.siblingAtColumn(1).data()) < 310
    assert len(index.siblingAtColumn(1).data(3)) < 3000  # the tooltip
    assert model.value(index) == long
    model.search("needle")
    assert model.rowCount() == 1


def test_not_all_of_fifty_thousand_fields_are_shown(display):
    fields = {f"group{i}": {f"name{j}": f"value {i} {j}" for j in range(100)} for i in range(500)}
    model = MetadataModel()
    show(model, fields)
    model.search("VALUE 77 5")
    assert len(paths(model)) == 12  # the group, 5 and 50 to 59
    model.search("")
    assert model.rowCount() == 501
    assert model.index(500, 0).data() == f"And {50_500 - MOST_ROWS:,} more: search, or copy as JSON"
    assert model.number(model.index(500, 0)) is None
    assert not model.index(500, 0).flags() & Qt.ItemIsEnabled


def test_tooltips_show_markup_as_text(model):
    tip = row(model, "tiff.Software").siblingAtColumn(1).data(3)
    assert "&lt;b>1" in tip
