"""Groups of channels, and stories of Minerva Author."""

import json

import numpy as np
import pytest

from napari_wsigpu.model.channel_groups import (
    ChannelGroup,
    default_groups,
    group_of,
    read_groups,
    write_groups,
)
from napari_wsigpu.model.composite import ChannelStyle, Composite
from napari_wsigpu.model.errors import SlideError, SlideReadError

NAMES = ["DNA", "CD3", "CD8", "CD20", "PanCK", "AF"]
COMPOSITE = Composite(tuple(ChannelStyle(name, "#ff0000", (0, 100)) for name in NAMES))
UINT16 = np.dtype(np.uint16)
# As Minerva Author writes it; limits are fractions of 65,535.
STORY = {
    "sample_info": {"rotation": 0},
    "groups": [
        {
            "label": "Immune",
            "channels": [
                {"id": 0, "label": "DNA", "color": "0000ff", "min": 0.01, "max": 0.5},
                {"id": 2, "label": "CD8", "color": "00FF00", "min": 0.0, "max": 0.2},
            ],
        }
    ],
    "waypoints": [],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.story.json"


def test_a_story_of_minerva_is_read(path):
    path.write_text(json.dumps(STORY))
    [group] = read_groups(path, COMPOSITE, UINT16)
    assert group.name == "Immune"
    shown = group.shown(COMPOSITE)
    assert shown.visible == (0, 2)
    assert shown.channels[2].color == "#00ff00"
    assert shown.channels[0].window == pytest.approx((655.35, 32767.5))
    assert shown.channels[0].name == "DNA"


def test_saved_groups_are_read_again(path):
    first = group_of(COMPOSITE.showing([1, 4]), "T cells")
    styled = COMPOSITE.styled(3, ChannelStyle("CD20", "#123456", (5, 60), 0.5)).showing([3])
    groups = [first, group_of(styled, "B cells")]
    write_groups(path, groups, UINT16)
    found = read_groups(path, COMPOSITE, UINT16)
    assert [group.name for group in found] == ["T cells", "B cells"]
    style = found[1].shown(COMPOSITE).channels[3]
    assert (style.color, style.gamma) == ("#123456", 0.5)
    assert style.window == pytest.approx((5, 60))
    assert found[0].shown(COMPOSITE).visible == (1, 4)


def test_channels_without_limits_keep_those_of_the_composite(path):
    write_groups(path, [group_of(Composite((ChannelStyle("DNA"),)), "One")], UINT16)
    [group] = read_groups(path, COMPOSITE, UINT16)
    assert group.shown(COMPOSITE).channels[0].window == (0, 100)


def test_groups_of_consecutive_channels():
    groups = default_groups(COMPOSITE, ChannelGroup("none", ()))
    assert [group.name for group in groups] == ["1 to 4", "5 to 6"]
    assert groups[1].shown(COMPOSITE).visible == (4, 5)
    few = Composite(COMPOSITE.channels[:5])
    assert [group.name for group in default_groups(few, groups[0])][1] == "5"


def test_channels_that_are_shown_initially_are_a_group():
    initial = group_of(COMPOSITE.showing([1, 5]), "as in the file")
    first, *others = default_groups(COMPOSITE, initial)
    assert first is initial
    assert others == default_groups(COMPOSITE, others[0])
    assert first.shown(COMPOSITE).visible == (1, 5)


def channel(**changes):
    return {"id": 0, "color": "ffffff", "min": 0, "max": 1} | changes


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"groups": 3}',
        '{"groups": []}',
        "[" * 100_000,
        *(
            json.dumps({"groups": [{"label": "a", "channels": [each]}]})
            for each in (
                channel(id=6),
                channel(id=-1),
                channel(id="DNA"),
                channel(id=1.5),
                channel(id=True),
                channel(id=float("inf")),
                channel(gamma=float("inf")),
                channel(color="red"),
                channel(color=3),
                channel(min=1),
                channel(max=None),
                channel(gamma=0),
                {"id": 0},
                7,
            )
        ),
    ],
)
def test_other_files_are_refused(path, content):
    path.write_text(content)
    with pytest.raises(SlideReadError, match="holds no channel groups"):
        read_groups(path, COMPOSITE, UINT16)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(SlideReadError, match="can't be read"):
        read_groups(tmp_path / "none.json", COMPOSITE, UINT16)
    with pytest.raises(SlideError, match="can't be written"):
        write_groups(tmp_path / "none" / "a.json", [], UINT16)
