"""What the inspector says, as text."""

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.sample import sample_path
from napari_wsigpu.widgets.facts import facts, flatten, level_facts
from tests import leica, slides


def test_facts_of_the_sample():
    with open_slide(sample_path()) as slide:
        said = dict(facts(slide))
    width, height = slide.dimensions
    assert said["Vendor"] == "aperio"
    assert said["Dimensions"].startswith(f"{width:,}")
    assert said["Pixel size"] == "0.499 µm"
    assert said["Objective"].startswith("20")
    assert said["Extent"].startswith(f"{width * 0.499e-3:.2f} mm")
    assert said["Associated images"] == "thumbnail, label, macro"
    assert "Damaged tiles" not in said
    assert height


def test_levels_of_the_sample():
    with open_slide(sample_path()) as slide:
        rows = level_facts(slide)
        assert [row.downsample for row in rows] == ["1", "2", "4", "8"]
        assert {row.compression for row in rows} == {"JPEG"}


def test_levels_of_a_canvas_are_encoded_as_its_parts_are(tmp_path):
    scans = [
        leica.scan(slides.picture(90, 120), 10_000, 15_500),
        leica.scan(slides.picture(90, 120), 500_000, 700_000),
    ]
    path = leica.write(tmp_path / "slide.scn", scans, (800_000, 900_000))
    with open_slide(path) as slide:
        assert dict(facts(slide))["Dimensions"].startswith("1,600")
        assert [(row.tile, row.compression) for row in level_facts(slide)] == [
            ("48 \N{MULTIPLICATION SIGN} 32", "deflate"),
            ("48 \N{MULTIPLICATION SIGN} 32", "deflate"),
        ]


def test_flatten_names_every_leaf():
    nested = {"a": 1, "b": {"c": None, "d": [1, 2]}, "e": [{"f": "x"}, {"f": "y"}]}
    assert list(flatten(nested)) == [
        ("a", "1"),
        ("b.c", ""),
        ("b.d", "[1, 2]"),
        ("e.0.f", "x"),
        ("e.1.f", "y"),
    ]
