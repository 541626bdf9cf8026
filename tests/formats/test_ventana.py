import struct

import numpy as np
import pytest

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.fields import iso_date
from napari_wsigpu.model.errors import CorruptSlideError
from tests import oracles
from tests.writers import slides, ventana
from tests.writers.ventana import TILE, Area

WHITE = 235


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.bif"


def stored(columns, rows, steps=(1, 2, 4)):
    pixels = slides.picture(rows * TILE[0], columns * TILE[1])
    return [pixels[::step, ::step] for step in steps]


def openslide_level(path, level):
    with oracles.openslide.OpenSlide(path) as slide:
        size = slide.level_dimensions[level]
        return oracles.opaque(slide.read_region((0, 0), level, size), WHITE)


def equals_openslide(path):
    dimensions, downsamples = oracles.openslide_shape(path)
    with open_slide(path) as slide:
        assert slide.vendor == oracles.openslide_properties(path)["openslide.vendor"] == "ventana"
        assert slide.layout.problems == ()
        assert slide.level_dimensions == dimensions
        assert slide.level_downsamples == downsamples
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], openslide_level(path, index))
        return slide.level_count


def test_a_tiff_without_joints(path):
    ventana.write(path, stored(5, 4), None)
    assert equals_openslide(path) == 3


@pytest.mark.parametrize("tiles", [(5, 4), (3, 1), (1, 3)])
@pytest.mark.parametrize("overlap", [(0, 0), (8, 4)])
def test_one_area(path, tiles, overlap):
    area = Area(tiles, overlap=overlap)
    if 1 in tiles:
        # Where no tiles are joined along an axis, OpenSlide divides by 0.
        overlap = tuple(o if n > 1 else 0 for o, n in zip(overlap, tiles, strict=True))
        ventana.write(path, stored(*tiles), ventana.stitching([area]))
        width, height = (
            size * n - (n - 1) * o for size, n, o in zip(TILE[::-1], tiles, overlap, strict=True)
        )
        with open_slide(path) as slide:
            assert slide.dimensions == (width, height)
    else:
        ventana.write(path, stored(*tiles), ventana.stitching([area]))
        assert equals_openslide(path) == 3


class TestFocalPlanes:
    """The sharp one comes first in the file, then those on one side, then those on the other."""

    SCAN = ventana.scan_xml(f'{ventana.SCAN} Z-layers="{{}}" Z-spacing="1.5"')

    @staticmethod
    def write(path, count, model=""):
        shown = [[level + np.uint8(40 * layer) for level in stored(5, 4)] for layer in range(count)]
        xml = ventana.stitching([Area((5, 4), overlap=(8, 4))])
        scan = TestFocalPlanes.SCAN.format(count).replace("<iScan ", f"<iScan {model}")
        ventana.write(path, shown[0], xml, scan=scan, layers=shown[1:])
        return shown, xml

    @pytest.mark.parametrize("model", ["", 'ScannerModel="VENTANA DP 200" '])
    @pytest.mark.parametrize(
        ("count", "order"), [(3, [1, 0, 2]), (5, [2, 1, 0, 3, 4]), (2, [0, 1])]
    )
    def test_each_is_as_in_a_file_of_its_own(self, path, tmp_path, model, count, order):
        shown, xml = self.write(path, count, model)
        with open_slide(path) as slide:
            assert slide.layout.problems == ()
            planes = slide.planes
            assert (planes.size_z, planes.z, planes.z_spacing) == (count, order.index(0), 1.5)
            assert slide.layout.other_planes == count - 1
            np.testing.assert_array_equal(slide.levels[0][...], openslide_level(path, 0))
            for z, layer in enumerate(order):
                scan = self.SCAN.format(1).replace("<iScan ", f"<iScan {model}")
                alone = ventana.write(tmp_path / "alone.bif", shown[layer], xml, scan=scan)
                with open_slide(alone) as other:
                    plane = slide.plane(z)
                    assert plane.level_dimensions == other.level_dimensions
                    for level, expected in zip(plane.levels, other.levels, strict=True):
                        np.testing.assert_array_equal(level[...], expected[...])

    def test_a_level_without_them_is_left_out(self, path):
        self.write(path, 3)
        content = bytearray(path.read_bytes())
        place = content.rindex(struct.pack("<HHII", 32997, 4, 1, 3))
        content[place : place + 12] = struct.pack("<HHII", 32997, 4, 1, 1)
        path.write_bytes(content)
        with open_slide(path) as slide:
            assert slide.level_count == 2
            assert slide.layout.problems == (
                "1 level(s) with a different number of focal planes are left out.",
            )

    @pytest.mark.parametrize("depth", [0, 4, 1 << 30])
    def test_more_than_the_file_has_tiles_for(self, path, depth):
        self.write(path, 3)
        tag = struct.pack("<HHII", 32997, 4, 1, 3)
        path.write_bytes(path.read_bytes().replace(tag, struct.pack("<HHII", 32997, 4, 1, depth)))
        with pytest.raises(CorruptSlideError, match=f"claims {depth} focal planes of 20 tiles"):
            open_slide(path)


def test_the_overlap_is_the_mean_by_confidence(path):
    area = Area((5, 4), overlap=(8, 4), by_gap={1: 12, 2: 4, 3: 16, 4: 0})
    ventana.write(path, stored(5, 4), ventana.stitching([area]))
    assert equals_openslide(path) == 3


def test_separate_areas_on_white(path):
    areas = [
        Area((2, 2), first=(0, 0), place=(40, 120), overlap=(8, 4)),
        Area((3, 2), first=(2, 2), place=(160.0, 8), overlap=(8, 4)),
    ]
    ventana.write(path, stored(5, 4), ventana.stitching(areas))
    assert equals_openslide(path) == 3
    with open_slide(path) as slide:
        assert (slide.levels[0][...] == WHITE).all(axis=-1).any()
        assert [r["x"] for r in slide.metadata["ventana"]["regions"]] == [40, 160]
        for level, index in [(0, np.s_[9:180:7, 3:290:5]), (1, np.s_[50:90, 20:130])]:
            expected = openslide_level(path, level)[index]
            np.testing.assert_array_equal(slide.levels[level][index], expected)


def test_unscanned_areas_are_no_parts(path):
    areas = [Area((3, 2), overlap=(8, 4)), Area((2, 2), first=(3, 0), scanned=0)]
    ventana.write(path, stored(5, 2), ventana.stitching(areas))
    assert equals_openslide(path) == 3


def test_fractions_of_pixels_are_rounded(path):
    """OpenSlide blends neighbours there; tiles here keep their pixels."""
    rows, columns = 4, 5
    y, x = np.mgrid[: rows * TILE[0], : columns * TILE[1]]
    smooth = np.stack([y % TILE[0] * 2, x % TILE[1] * 2, y % TILE[0] + x % TILE[1]], -1)
    area = Area((columns, rows), overlap=(7.5, 3.25))
    ventana.write(path, [smooth.astype(np.uint8)], ventana.stitching([area]))
    with open_slide(path) as slide:
        assert slide.level_dimensions == oracles.openslide_shape(path)[0]
        difference = np.abs(slide.levels[0][...].astype(int) - openslide_level(path, 0))
        assert np.median(difference) <= 1
        assert np.mean(difference > 2) < 0.12  # the edges of tiles


@pytest.mark.parametrize("to_and_fro", [False, True])
def test_later_scanners_join_each_column_by_itself(path, to_and_fro):
    """Their lower levels are stored stitched."""
    area = Area((5, 4), by_gap={2: 8, 3: 16}, to_and_fro=to_and_fro)
    levels = stored(5, 4)
    columns = np.r_[0:96, 104:144, 160:240]
    stitched = levels[0][:, columns]
    ventana.write(
        path,
        [levels[0], stitched[::2, ::2]],
        ventana.stitching([area]),
        scan=ventana.scan_xml('ScannerModel="VENTANA DP 200" ' + ventana.SCAN),
    )
    with open_slide(path) as slide:
        assert slide.layout.problems == ()
        assert slide.metadata["scanner"] == "VENTANA DP 200"
        assert slide.level_downsamples == (1, 2)
        # A tile covers the edge of the one to its left.
        shown = np.r_[0:88, 96:128, 144:240]
        assert slide.dimensions == (240 - 24, 128)
        np.testing.assert_array_equal(slide.levels[0][...], levels[0][:, shown])
        np.testing.assert_array_equal(slide.levels[1][...], stitched[::2, ::2])


@pytest.mark.parametrize("swapped", [False, True])
def test_lower_levels_of_later_scanners_may_be_packed_as_the_first_one(path, swapped):
    """As a DP 200 was measured: all joints are LEFT, with tiles in either order."""

    class Left(Area):
        def joint(self, direction, tiles, x, y):
            tiles = tiles[::-1] if swapped else tiles
            return super().joint("LEFT" if direction == "RIGHT" else direction, tiles, x, y)

    by_gap = {2: 8, 4: 16}
    starts = np.cumsum([0, 48, 48 - 8, 48, 48 - 16])
    y, x = np.mgrid[:128, : starts[-1] + 48] // 8
    world = np.stack([x * 5 % 256, y * 9 % 256, (x + y) * 7 % 256], -1).astype(np.uint8)
    packed = np.concatenate([world[:, start : start + 48] for start in starts], axis=1)
    levels = [packed, packed[::2, ::2], packed[::4, ::4]]
    ventana.write(
        path,
        [np.ascontiguousarray(level) for level in levels],
        ventana.stitching([Left((5, 4), by_gap=by_gap)]),
        scan=ventana.scan_xml('ScannerModel="VENTANA DP 200" ' + ventana.SCAN),
    )
    with open_slide(path) as slide:
        assert slide.layout.problems == ()
        for level, step in zip(slide.levels[:3], (1, 2, 4), strict=True):
            np.testing.assert_array_equal(level[...], world[::step, ::step])


def test_missing_tiles_are_white(path):
    ventana.write(path, stored(5, 4), None, missing=[0, 7])
    with open_slide(path) as slide:
        pixels = slide.levels[0][...]
        assert (pixels[: TILE[0], : TILE[1]] == WHITE).all()
        assert (pixels[: TILE[0], TILE[1] :] != WHITE).any()


def test_properties_are_openslides(path):
    ventana.write(path, stored(5, 4), ventana.stitching([Area((5, 4), overlap=(8, 4))]))
    properties = oracles.openslide_properties(path)
    prefix = "ventana."
    expected = {
        key.removeprefix(prefix): value
        for key, value in properties.items()
        if key.startswith(prefix)
    }
    with open_slide(path) as slide:
        found = dict(slide.metadata["ventana"])
        (region,) = found.pop("regions")
        assert found == expected
        assert len(expected) == 7
        for name, value in region.items():
            assert value == int(properties[f"openslide.region[0].{name}"])
        assert slide.mpp == (
            float(properties["openslide.mpp-x"]),
            float(properties["openslide.mpp-y"]),
        )
        assert slide.objective == float(properties["openslide.objective-power"])
        assert slide.metadata["barcode"] == "A 1"
        assert slide.metadata["scan_date"] == iso_date(properties["tiff.DateTime"])


def test_associated_images_are_openslides(path):
    ventana.write(path, stored(5, 4), None)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert set(slide.associated_images) == set(other.associated_images)
        assert set(slide.associated_images) == {"macro", "thumbnail"}
        for name, image in slide.associated_images.items():
            expected = np.asarray(other.associated_images[name])[..., :3]
            np.testing.assert_array_equal(image.read(), expected)


def test_a_damaged_tile_is_named_by_its_level(path):
    ventana.write(path, stored(5, 4), ventana.stitching([Area((5, 4), overlap=(8, 4))]))
    layout = describe(path)
    offset = int(layout.levels[0].grid.offsets[0, 1, 2])
    data = bytearray(path.read_bytes())
    data[offset : offset + 20] = bytes(20)
    path.write_bytes(data)
    with open_slide(path) as slide:
        with pytest.raises(SlideError, match="level 0, row 1, column 2"):
            slide.levels[0][...]
        assert (slide.level_array(0, tolerant=True)[28:56, 80:120] == WHITE).all()
        assert slide.stats()["failed"] == 1


GOOD = ventana.stitching([Area((5, 4), overlap=(8, 4))])
BOMB = '<!DOCTYPE e [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><EncodeInfo>&b;</EncodeInfo>'


@pytest.mark.parametrize(
    ("encoded", "problem"),
    [
        (GOOD[:-30], "can't be read"),
        (BOMB, "declares entities"),
        (b"<EncodeInfo a='\xff\xfe'>", "can't be read"),
        ("<Other/>", "positions of its scanned areas"),
        (GOOD.replace("AOI0", "AOI0/><AOI1"), "positions of its scanned areas"),
        (GOOD.replace('AOIScanned="1"', 'AOIScanned="0"'), "no scanned area"),
        (GOOD.replace('NumCols="5"', 'NumCols="1000000000000"'), "beyond the tiles of the file"),
        (GOOD.replace('NumCols="5"', 'NumCols="0"'), "no tiles"),
        (GOOD.replace('NumCols="5"', 'NumCols="4.5"'), "not whole"),
        (GOOD.replace('OriginX="0"', 'OriginX="-48"'), "no tiles"),
        (GOOD.replace('OriginX="0"', 'OriginX="7"'), "differ in size"),
        (GOOD.replace('Width="48"', 'Width="0"'), "differ in size"),
        (GOOD.replace('Pos-X="0"', 'Pos-X="nan"'), "missing or wrong"),
        (GOOD.replace('Pos-X="0"', 'Pos-X="1e15"'), "outside any slide"),
        (GOOD.replace('Pos-X="0"', 'Pos-X="-500"'), "outside any slide"),
        (GOOD.replace('Pos-X="0"', 'Pos-X="-50"'), None),
        (GOOD.replace('OverlapX="8"', 'OverlapX="48"'), "overlap(s) of tiles are inconsistent"),
        (GOOD.replace('OverlapX="8"', 'OverlapX="nan"'), "overlap(s) of tiles are inconsistent"),
        (
            GOOD.replace('Direction="UP"', 'Direction="NORTH"'),
            "overlap(s) of tiles are inconsistent",
        ),
        (GOOD.replace('Tile1="1"', 'Tile1="999"'), "overlap(s) of tiles are inconsistent"),
        (
            GOOD.replace('Confidence="99"', 'Confidence="-1"'),
            "overlap(s) of tiles are inconsistent",
        ),
        (GOOD.replace('Confidence="99"', 'Confidence="0"'), None),
    ],
)
def test_hostile_joints(path, encoded, problem):
    """Something is shown, and what was wrong is said in a few short sentences."""
    ventana.write(path, stored(5, 4), encoded)
    with open_slide(path) as slide:
        assert slide.vendor == "ventana"
        assert slide.mpp == (0.465, 0.465)
        assert (problem is None) == (not slide.layout.problems)
        assert problem is None or problem in slide.layout.problems[0]
        assert sum(map(len, slide.layout.problems)) < 500
        for level in slide.levels:
            assert level[...].shape == level.shape


@pytest.mark.parametrize(
    ("scan", "problem"),
    [
        ("<iScan", "can't be read"),
        ("<Metadata><Other a='<iScan'/></Metadata>", "can't be read"),
        ("<Metadata><Other><iScan/></Other></Metadata>", "no element iScan"),
        (b"<iScan a='\xff\x80'/>", None),
        ("<iScan ScanRes='0' Magnification='-20' ScanWhitePoint='300'/>", None),
        ("<iScan ScanRes='nan' Magnification='1e999' ScanWhitePoint='x'/>", None),
        (f"<iScan ScanRes='{'9' * (1 << 20)}'/>", None),
        ("<iScan Z-layers='3'/>", "The file declares 3 focal plane(s), but holds 1."),
    ],
)
def test_hostile_properties(path, scan, problem):
    ventana.write(path, stored(5, 4), GOOD, scan=scan)
    with open_slide(path) as slide:
        assert slide.vendor == "ventana"
        assert slide.mpp is None
        assert slide.objective is None
        assert slide.layout.background == 255
        assert (problem is None) == (not slide.layout.problems)
        assert problem is None or problem in slide.layout.problems[0]
        assert len(str(slide.metadata)) < 20_000
        assert slide.levels[0][...].size


@pytest.mark.parametrize(
    ("descriptions", "count"),
    [
        (("level=0 mag=20", "level=1 mag=20", "level=2 mag=5"), 2),
        (("level=0 mag=nan", "level=1 mag=10", "level=2"), 1),
        (("one", "two", "three"), 1),
    ],
)
def test_contradicting_levels(path, descriptions, count):
    ventana.write(path, stored(5, 4), None, descriptions=descriptions)
    with open_slide(path) as slide:
        assert slide.level_count == count
        assert slide.layout.problems
        assert slide.levels[0][...].size
