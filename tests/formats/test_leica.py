import pickle

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import UnsupportedSlideError
from tests import oracles
from tests.writers import leica, slides
from tests.writers.leica import SPACING, scan

SIZE = (400 * SPACING, 300 * SPACING)


def overview(**more):
    return scan(slides.picture(30, 40), 0, 0, (), view=SIZE, objective="0.6", **more)


def two_regions():
    return [
        scan(slides.picture(90, 120), 20 * SPACING, 31 * SPACING),
        scan(slides.picture(101, 130), 211 * SPACING + 77, 160 * SPACING + 499),
    ]


@pytest.fixture
def path(tmp_path):
    return leica.write(tmp_path / "slide.scn", [overview(), *two_regions()], SIZE)


def openslide_rgba(path, place, size, level=0):
    with oracles.openslide.OpenSlide(path) as slide:
        return np.asarray(slide.read_region(place, level, size))


def test_levels_are_openslides(path):
    dimensions, downsamples = oracles.openslide_shape(path)
    with open_slide(path) as slide:
        assert slide.vendor == oracles.openslide_properties(path)["openslide.vendor"] == "leica"
        assert slide.level_dimensions == dimensions == ((400, 300), (200, 150))
        assert slide.level_downsamples == pytest.approx(downsamples, rel=1e-12)
        assert slide.layout.problems == ()
        for index, level in enumerate(slide.levels):
            rgba = openslide_rgba(path, (0, 0), dimensions[index], index)
            assert (rgba[..., 3] == 0).any()
            np.testing.assert_array_equal(level[...], oracles.opaque(rgba))


@pytest.mark.parametrize(
    ("place", "size"),
    [
        ((15, 25), (40, 30)),  # over the corner of a region
        ((60, 70), (200, 140)),  # over both regions and what is between them
        ((130, 40), (60, 90)),  # between them
        ((-20, -30), (90, 90)),  # outside of the slide
        ((330, 240), (120, 100)),
        ((40, 50), (0, 9)),
    ],
)
def test_regions_are_openslides(path, place, size):
    with open_slide(path) as slide:
        found = slide.read_region(place, size)
    if 0 in size:
        assert found.shape == (size[1], size[0], 3)
    else:
        rgba = openslide_rgba(path, place, size)
        np.testing.assert_array_equal(found, oracles.opaque(rgba))


def test_regions_that_overlap_show_the_first(tmp_path):
    scans = [
        overview(),
        scan(slides.picture(90, 120), 20 * SPACING, 30 * SPACING, ()),
        scan(255 - slides.picture(90, 120), 70 * SPACING, 80 * SPACING, ()),
    ]
    path = leica.write(tmp_path / "slide.scn", scans, SIZE)
    expected = oracles.opaque(openslide_rgba(path, (0, 0), (400, 300)))
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        np.testing.assert_array_equal(slide.levels[0][40:200, 30:150], expected[40:200, 30:150])


@pytest.mark.parametrize("namespace", ["2010/10/01", "2010/03/10"])
@pytest.mark.parametrize("barcode", ["slide 1", None])
def test_properties_are_openslides(tmp_path, namespace, barcode):
    path = leica.write(
        tmp_path / "slide.scn",
        [overview(), *two_regions()],
        SIZE,
        namespace=f"http://www.leica-microsystems.com/scn/{namespace}",
        barcode=barcode,
    )
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide:
        found = dict(slide.metadata["leica"])
        regions = found.pop("regions")
        prefix = "leica."
        expected = {
            key.removeprefix(prefix): value
            for key, value in properties.items()
            if key.startswith(prefix)
        }
        assert found == expected
        assert len(expected) == (7 if barcode else 6)
        for index, region in enumerate(regions):
            for name, value in region.items():
                assert value == int(properties[f"openslide.region[{index}].{name}"])
        assert f"openslide.region[{len(regions)}].x" not in properties
        assert slide.mpp == pytest.approx(
            (float(properties["openslide.mpp-x"]), float(properties["openslide.mpp-y"])), rel=1e-9
        )
        assert slide.objective == float(properties["openslide.objective-power"])
        assert slide.metadata["scanner"] == "Leica SCN400"
        assert properties["leica.device-model"] == "Leica SCN400;Leica SCN"
        assert slide.metadata["scan_date"] == properties["leica.creation-date"]
        assert slide.metadata["barcode"] == properties.get("openslide.barcode") == barcode
        assert "ImageDescription" not in slide.metadata["tiff"]


def test_a_barcode_of_the_older_kind_is_an_attribute(tmp_path):
    path = leica.write(
        tmp_path / "slide.scn",
        [overview(), *two_regions()],
        SIZE,
        barcode=None,
        edit=lambda xml: xml.replace("<collection ", '<collection barcode="A 1" '),
    )
    assert describe(path).barcode == oracles.openslide_properties(path)["openslide.barcode"]


def test_the_macro_image_is_openslides(path):
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert set(slide.associated_images) == set(other.associated_images) == {"macro"}
        expected = np.asarray(other.associated_images["macro"])[..., :3]
        np.testing.assert_array_equal(slide.associated_images["macro"].read(), expected)


def test_jpeg_tiles(tmp_path):
    path = leica.write(
        tmp_path / "slide.scn",
        [overview(), *two_regions()],
        SIZE,
        compression=7,
        photometric=6,
        encode=slides.jpeg_ycbcr,
    )
    expected = oracles.opaque(openslide_rgba(path, (0, 0), (400, 300)))
    with open_slide(path) as slide:
        difference = np.abs(slide.levels[0][...].astype(int) - expected)
        assert difference.max() <= 2


def fluorescence(dtype="uint8", count=3):
    channels = [
        [slides.picture(90, 120, dtype=dtype)[..., :1] // (c + 1) for c in range(count)],
        [slides.picture(90, 120, dtype=dtype)[::2, ::2, :1] // (c + 1) for c in range(count)],
    ]
    return leica.Scan(
        channels,
        20 * SPACING,
        30 * SPACING,
        illumination="fluorescence",
        channels=[
            {"index": "1", "name": "L5", "rgb": "#00FF00"},
            {"index": "0", "name": "405|Empty", "rgb": "#0000FF"},
            {"index": "2", "name": "TX2"},
        ][:count],
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_fluorescence(tmp_path, dtype):
    item = fluorescence(dtype)
    path = leica.write(tmp_path / "slide.scn", [overview(), item], SIZE)
    with open_slide(path) as slide:
        assert not slide.layout.rgb
        assert slide.layout.problems == ()
        assert [(c.name, c.color) for c in slide.channels] == [
            ("405|Empty", "#0000ff"),
            ("L5", "#00ff00"),
            ("TX2", None),
        ]
        assert slide.metadata["leica"]["illumination-source"] == "fluorescence"
        assert slide.level_dimensions == ((400, 300), (200, 150))
        expected = np.zeros((300, 400, 3), dtype)
        expected[30:120, 20:140] = np.concatenate(item.levels[0], axis=-1)
        np.testing.assert_array_equal(slide.levels[0][...], expected)
        np.testing.assert_array_equal(slide.level_array(0, 1)[...], expected[..., 1])
        np.testing.assert_array_equal(
            slide.levels[0][5:200:7, 9:300:5, 2], expected[5:200:7, 9:300:5, 2]
        )


def test_brightfield_goes_before_fluorescence_as_in_openslide(tmp_path):
    path = leica.write(tmp_path / "slide.scn", [overview(), fluorescence(), *two_regions()], SIZE)
    with open_slide(path) as slide:
        assert slide.level_dimensions == oracles.openslide_shape(path)[0]
        assert slide.layout.rgb
        assert slide.layout.problems == (
            "1 region(s) with an illumination other than brightfield are not shown.",
        )


def test_regions_of_another_resolution_are_named_where_openslide_refuses_the_slide(tmp_path):
    more = scan(slides.picture(90, 120), 250 * SPACING, 0, spacing=250, objective="40")
    path = leica.write(tmp_path / "slide.scn", [overview(), *two_regions(), more], SIZE)
    with pytest.raises(oracles.openslide.OpenSlideError):
        oracles.openslide_shape(path)
    with open_slide(path) as slide:
        assert len(slide.metadata["leica"]["regions"]) == 2
        assert len(slide.layout.problems) == 1
        assert "another objective" in slide.layout.problems[0]


@pytest.mark.parametrize("last", [False, True])
def test_overview_and_label_of_versa_scanners(tmp_path, last):
    """Their overview shows a part of the slide, and the label is a picture of its own."""
    slideio = pytest.importorskip("slideio")
    pixels = slides.picture(90, 120)
    view = (350 * SPACING, 250 * SPACING)
    macro = scan(slides.picture(40, 60), 30 * SPACING, 20 * SPACING, view=view, objective="1.25")
    scans = [macro, scan(pixels, 100 * SPACING, 110 * SPACING)][:: -1 if last else 1]
    # A smaller level of the overview serves as the label.
    label = 3 if last else 1
    listed = f'<supplementalImage type="label" ifd="{label}"/></collection>'
    path = leica.write(
        tmp_path / "slide.scn", scans, SIZE, edit=lambda xml: xml.replace("</collection>", listed)
    )
    with open_slide(path) as slide, slideio.open_slide(str(path), "SCN") as other:
        assert slide.layout.problems == ()
        assert slide.objective == 20
        np.testing.assert_array_equal(slide.levels[0][110:200, 100:220], pixels)
        assert set(slide.associated_images) == {"macro", "label"}
        assert other.get_aux_image_names() == ["label"]
        for name, page in (("label", label), ("macro", label - 1)):
            expected = oracles.tifffile_page(path, page)
            np.testing.assert_array_equal(slide.associated_images[name].read(), expected)
        (frame,) = (each.frame for each in slide.layout.associated if each.name == "macro")
        assert frame == (30, 20, 350, 250)


@pytest.mark.parametrize("listed", ['ifd="99"', 'ifd="x"', "", 'ifd="-1"'])
def test_a_label_on_a_page_that_does_not_exist(tmp_path, listed):
    element = f'<supplementalImage type="label" {listed}/></collection>'
    path = leica.write(
        tmp_path / "slide.scn",
        [overview(), *two_regions()],
        SIZE,
        edit=lambda xml: xml.replace("</collection>", element),
    )
    with open_slide(path) as slide:
        assert set(slide.associated_images) == {"macro"}


def test_only_an_overview(tmp_path):
    path = leica.write(tmp_path / "slide.scn", [overview()], SIZE)
    with pytest.raises(UnsupportedSlideError, match=r"slide\.scn.*only an overview"):
        open_slide(path)


def test_planes_of_a_stack(tmp_path):
    pixels = slides.picture(90, 120)
    scans = [overview(), scan(pixels, SPACING, SPACING, planes=3)]
    path = leica.write(tmp_path / "slide.scn", scans, SIZE)
    with open_slide(path) as slide:
        assert slide.level_dimensions == oracles.openslide_shape(path)[0]
        assert slide.layout.other_planes == 2
        assert (slide.planes.z, slide.planes.size_z, slide.planes.z_spacing) == (0, 3, 1.2)
        for z in range(3):
            found = slide.plane(z).levels[0][1:91, 1:121]
            np.testing.assert_array_equal(found, pixels // (z + 1))


def test_a_slide_goes_to_another_process(path):
    with open_slide(path) as slide:
        expected = slide.levels[0][...]
        with pickle.loads(pickle.dumps(slide)) as other:
            np.testing.assert_array_equal(other.levels[0][...], expected)


BOMB = (
    '<!DOCTYPE scn [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]><scn xmlns="{}">&b;'
)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda xml: xml[:-20], "XML can't be read"),
        (lambda xml: BOMB.format(leica.NAMESPACE), "declares entities"),
        (lambda xml: xml.replace("<scn ", "<scn a='\xff' b='&undefined;' "), "XML can't be read"),
        (lambda xml: xml.encode().replace(b'name="c"', b'name="\xe4\xff"'), None),
        (lambda xml: xml.replace("collection", "selection"), "no collection"),
        (lambda xml: xml.replace(f'sizeX="{SIZE[0]}"', 'sizeX="nan"', 1), "missing or wrong"),
        (lambda xml: xml.replace(f'sizeX="{SIZE[0]}"', 'sizeX="-5"', 1), "not positive"),
        (lambda xml: xml.replace(f'sizeX="{SIZE[0]}"', f'sizeX="{10**15}"', 1), "impossible size"),
        (lambda xml: xml.replace(f'sizeX="{SIZE[0]}"', f'sizeX="{10**99}"', 1), "missing or wrong"),
        (
            lambda xml: xml.replace(f'sizeX="{SIZE[0]}"', "", 1).replace(
                'offsetX="', 'offsetX="-100000000'
            ),
            "impossible size",
        ),
        (lambda xml: xml.replace("<view", "<sight"), "position on the slide"),
        (lambda xml: xml.replace('offsetX="10000"', 'offsetX="1e999"'), "missing or wrong"),
        (lambda xml: xml.replace('ifd="1"', 'ifd="99"'), "page 99"),
        (lambda xml: xml.replace('ifd="1"', 'ifd="-1"'), "page -1"),
        (lambda xml: xml.replace('ifd="', 'page="'), "missing or wrong"),
        (lambda xml: xml.replace("<dimension", "<extent"), "no pixels"),
        (lambda xml: xml.replace('sizeX="120"', 'sizeX="0"'), "not positive"),
        (lambda xml: xml.replace("<barcode>c2xp", "<barcode>\N{BULLET}=="), "barcode"),
        (lambda xml: xml.replace("Leica SCN400", "x" * (1 << 20)), None),
        (lambda xml: xml.replace("<objective>20", "<objective>NaN"), None),
    ],
)
def test_hostile_xml(tmp_path, edit, problem):
    """Something is shown, and what was wrong is said in a few short sentences."""
    path = tmp_path / "slide.scn"
    leica.write(path, [overview(), *two_regions()], SIZE, edit=edit)
    with open_slide(path) as slide:
        assert slide.vendor == "leica"
        assert slide.levels[-1][...].size
        assert (problem is None) == (not slide.layout.problems)
        assert problem is None or problem in " ".join(slide.layout.problems)
        assert sum(map(len, slide.layout.problems)) < 2000
        assert len(str(slide.metadata)) < 20_000
        assert slide.mpp is not None or problem


def test_channels_of_different_sizes(tmp_path):
    item = fluorescence()
    item.levels[0][1] = slides.picture(60, 120)[..., :1]
    path = leica.write(tmp_path / "slide.scn", [overview(), item], SIZE)
    with open_slide(path) as slide:
        assert slide.layout.problems
        assert slide.levels[0][...].size
