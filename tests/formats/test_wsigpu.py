"""Records that are damaged or hostile: the pixels are still shown."""

import json

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from tests.writers import slides

PIXELS = slides.picture(100, 100, 1, "uint16")[..., 0]


def write(path, description, pages=()):
    with tifffile.TiffWriter(path) as file:
        file.write(
            PIXELS, tile=(64, 64), description=description, metadata=None, photometric="minisblack"
        )
        for text in pages:
            file.write(slides.picture(20, 30), photometric="rgb", description=text, metadata=None)
    return path


def opened(tmp_path, record, pages=()):
    text = record if isinstance(record, str) else json.dumps({"wsigpu": 1} | record)
    return open_slide(write(tmp_path / "s.tif", text, pages), "cpu")


DAMAGED = {
    "cut": '{"wsigpu": 1, "mpp": [0.5',
    "other": '{"wsigpu": }',
    "deep": '{"wsigpu": ' + "[" * 200_000,
    "deep and whole": '{"wsigpu": ' + "[" * 5000 + "]" * 5000 + "}",
    "number": '{"wsigpu": 1' + "0" * 100_000 + "}",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_record(tmp_path, case):
    with opened(tmp_path, DAMAGED[case]) as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 0], PIXELS)
        assert slide.vendor == "wsigpu"
        assert len(slide.layout.problems) == 1


WRONG = [0, -1, 1e300, "a", None, [], {}, True, [[]], [None, None], [0, 0], [-1, 1], ["x", "y"],
         [1, 2, 3], {"a": 1}, 1e999, "\ud800"]  # fmt: skip
KEYS = ["vendor", "scanner", "scan_date", "barcode", "objective", "mpp", "background", "channels",
        "downsamples", "metadata", "region"]  # fmt: skip


@pytest.mark.parametrize("region", [[0, 0, 0, 9], [-1, 0, 9, 9], [0, 0, True, 9], [0, 0, 9, 1e9]])
def test_impossible_region_is_left_out(tmp_path, region):
    for record in ({"region": region}, {"metadata": {"wsigpu": {"region": region}}}):
        with opened(tmp_path, record) as slide:
            assert slide.metadata["wsigpu"] == {"vendor": None}


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_is_left_out(tmp_path, key):
    for wrong in WRONG:
        with opened(tmp_path, {key: wrong}) as slide:
            np.testing.assert_array_equal(slide.levels[0][..., 0], PIXELS)
            json.dumps(slide.metadata)
            assert slide.level_downsamples == (1,)
            assert slide.mpp is None or min(slide.mpp) > 0
            assert len(slide.channels) == 1


def test_record_values_are_used(tmp_path):
    record = {
        "scanner": "Maker Model", "objective": 40, "mpp": [0.25, 0.5], "background": 7,
        "channels": [{"name": "DAPI", "color": "#0000ff"}], "metadata": {"maker": {"a": "b"}},
        "vendor": "maker", "scan_date": "2020-01-31", "barcode": "123", "downsamples": [1.0],
    }  # fmt: skip
    pages = ['{"wsigpu": 1, "associated": "macro"}', "nothing", '{"wsigpu": 1, "associated": 5}']
    with opened(tmp_path, record, pages) as slide:
        assert (slide.mpp, slide.objective) == ((0.25, 0.5), 40)
        assert slide.metadata["maker"] == {"a": "b"}
        assert [slide.metadata[key] for key in ("scanner", "scan_date", "barcode")] == [
            "Maker Model", "2020-01-31", "123",
        ]  # fmt: skip
        assert slide.channels[0].color == "#0000ff"
        assert slide.layout.background == 7
        assert list(slide.associated_images) == ["macro"]
        np.testing.assert_array_equal(
            slide.associated_images["macro"].read(), slides.picture(20, 30)
        )
