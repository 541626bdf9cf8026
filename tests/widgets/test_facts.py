"""Texts of the inspector."""

from dataclasses import replace

import numpy as np
import pytest
import tifffile

from napari_wsigpu import convert, open_slide
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.slide.facts import (
    damage,
    facts,
    file_report,
    level_facts,
    levels_in_short,
)
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.writers import leica, ndpi, slides


def table(slide):
    plain = str.maketrans({"\N{NO-BREAK SPACE}": " ", "\N{MULTIPLICATION SIGN}": "x"})
    return {name: value.translate(plain) for name, value in facts(slide)}


def test_facts_of_the_sample():
    with open_slide(sample_path()) as slide:
        found = table(slide)
    width, height = slide.dimensions
    assert found["Vendor"] == "Aperio"
    assert found["Dimensions"] == f"{width:,} x {height:,} px"
    assert found["MPP"] == "0.499 µm/px"
    assert found["Objective"] == "20x"
    assert found["Extent"] == f"{width * 0.499e-3:.4g} x {height * 0.499e-3:.4g} mm"
    assert found["Channels"] == "RGB, uint8"


def test_facts_of_channels(write_channels):
    with open_slide(write_channels(2)[0]) as slide:
        found = table(slide)
    assert found["MPP"] == "0.5 x 0.25 µm/px"
    assert found["Extent"] == "750 x 300 µm"
    assert found["Channels"] == "2, uint16: DAPI, CD3"
    assert found["Objective"] == "not given"


def test_a_region_says_where_it_lies(tmp_path):
    convert(sample_path(), tmp_path / "out.ome.tif", region=(1024, 512, 700, 300))
    with open_slide(tmp_path / "out.ome.tif") as slide:
        assert table(slide)["Region"] == "700 x 300 px at x 1,024, y 512 in the source slide"


def test_many_channels_are_cut_short(tmp_path):
    path = tmp_path / "many.ome.tif"
    pixels = np.zeros((9, 64, 4200), np.uint8)
    tifffile.imwrite(
        path, pixels, tile=(64, 64), photometric="minisblack", metadata={"axes": "CYX"}
    )
    with open_slide(path) as slide:
        assert table(slide)["Channels"].endswith("3 more")


def test_scanner_is_said_where_it_is_known():
    with open_slide(sample_path()) as slide:
        layout = replace(slide.layout, scanner="ScanScope")
    with Slide(layout) as slide:
        assert table(slide)["Scanner"] == "ScanScope"


def test_levels_of_the_sample():
    with open_slide(sample_path()) as slide, tifffile.TiffFile(sample_path()) as file:
        rows = level_facts(slide)
        assert [row.downsample for row in rows] == ["1", "2", "4", "8"]
        assert {row.compression for row in rows} == {"JPEG"}
        pages = file.series[0].levels
        counts = [sum(page.keyframe.databytecounts) for page in pages]
        assert [row.bytes for row in rows] == [byte_size(count) for count in counts]
        assert levels_in_short(slide) == f"4 stored levels, {byte_size(sum(counts))} of tiles"


def test_computed_levels_are_named_so(tmp_path):
    path = tmp_path / "single.tif"
    tifffile.imwrite(path, np.zeros((64, 4200, 3), np.uint8), tile=(64, 64), photometric="rgb")
    with open_slide(path) as slide:
        rows = level_facts(slide)
        assert [row.compression for row in rows] == ["none", "computed", "computed", "computed"]
        assert [row.bytes == "" for row in rows] == [False, True, True, True]
        assert levels_in_short(slide).startswith("1 stored level, 3 computed, ")


def test_inserted_levels_are_in_their_place_and_have_no_number(tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(40, 5000), (4,), photometric="rgb")
    with open_slide(path) as slide:
        rows = level_facts(slide)
        assert [row.level for row in rows] == ["0", "", "1", ""]
        assert [row.downsample for row in rows] == ["1", "2", "4", "8"]
        assert [row.compression == "computed" for row in rows] == [False, True, False, True]
        assert levels_in_short(slide).startswith("2 stored levels, 2 computed, ")


def test_levels_that_a_format_lets_decoders_scale_are_computed(tmp_path):
    path = tmp_path / "slide.ndpi"
    pages = [ndpi.level(slides.picture(side, side), blocks=2) for side in (256, 64)]
    ndpi.write(path, pages)
    with open_slide(path) as slide:
        names = [row.compression for row in level_facts(slide)]
        assert names == ["JPEG", "JPEG, scaled", "JPEG", *["JPEG, scaled"] * 3]
        assert [row.bytes == "" for row in level_facts(slide)] == [name != "JPEG" for name in names]
        assert levels_in_short(slide).startswith("2 stored levels, 4 computed, ")


def test_damage_is_said_once_it_turned_up(damaged_slide):
    with open_slide(damaged_slide) as slide:
        assert damage(slide) == []
        slide.level_array(0, tolerant=True)[6 * 256 : 7 * 256, 8 * 256 : 9 * 256]
        assert damage(slide) == ["1 damaged tile can't be shown."]


def test_scanner_masks_private_text(tmp_path):
    fields = ("AppMag = 20", "MPP = 0.5", "ScanScope ID = SECRETUSER", "User = SECRETUSER")
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(60, 60), (), fields=fields)
    with open_slide(tmp_path / "slide.svs") as slide:
        assert "SECRETUSER" in slide.metadata["scanner"]
        assert table(slide)["Scanner"].startswith("Aperio ScanScope")
        assert "SECRETUSER" not in str(facts(slide))


def test_problems_mask_private_text():
    with open_slide(sample_path()) as slide:
        layout = replace(slide.layout, problems=("The MPP is negative.",))
    with Slide(layout) as slide:
        assert file_report(slide, private=False).problems == ["The MPP is negative."]
        assert file_report(slide, private=True).problems == ["The MPP is negative."]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (12_345_678, "12.35 MB")],
)
def test_byte_size(count, text):
    assert byte_size(count) == text


def test_levels_of_a_canvas_are_encoded_as_its_parts_are(tmp_path):
    scans = [
        leica.scan(slides.picture(90, 120), 10_000, 15_500),
        leica.scan(slides.picture(90, 120), 500_000, 700_000),
    ]
    path = leica.write(tmp_path / "slide.scn", scans, (800_000, 900_000))
    with open_slide(path) as slide:
        assert table(slide)["Dimensions"].startswith("1,600")
        first, second = level_facts(slide)
        images = slide.layout.levels[0].stored
    assert (first.tile.split()[0], second.compression) == ("48", "deflate")
    assert len(images) == 2
    assert first.bytes == byte_size(sum(int(image.grid.byte_counts.sum()) for image in images))
