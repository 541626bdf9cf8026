import re
import time

import numpy as np
import pytest
import tifffile

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.tiff.aperio import parse_description
from napari_wsigpu.model.errors import CorruptSlideError, UnsupportedSlideError
from tests import oracles
from tests.writers import slides, tiffbytes


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("thumbnail", [False, True])
@pytest.mark.parametrize("steps", [(), (2,), (4, 4), (4, 2, 2), (3, 2)])
def test_levels_are_openslides(tmp_path, steps, thumbnail, reduced):
    path = tmp_path / "slide.svs"
    # Without a thumbnail the page after the first is already a level.
    slides.write_aperio(
        path,
        slides.picture(407, 613),
        steps,
        thumbnail=thumbnail,
        reduced=reduced,
        missing=[()] * 4,
        associated=(),
    )
    with open_slide(path) as slide:
        dimensions, downsamples = oracles.openslide_shape(path)
        assert slide.vendor == "aperio"
        assert slide.level_dimensions == dimensions
        assert slide.level_downsamples == pytest.approx(downsamples, rel=1e-12)
        assert set(slide.associated_images) == ({"thumbnail"} if thumbnail else set())
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], oracles.openslide_level(path, index))


@pytest.mark.parametrize("text", ["", "\r\n"])
def test_a_description_of_very_many_digits_takes_no_time(tmp_path, text):
    """Looking for the size of the slide from each of them would take an hour."""
    path = tmp_path / "slide.svs"
    description = f"Aperio Image Library {text}{'0' * 500_000}|AppMag = 20|MPP = 0.5"
    options = {"tile": (256, 256), "photometric": "rgb", "description": description}
    tifffile.imwrite(path, np.zeros((300, 300, 3), np.uint8), metadata=None, **options)
    begin = time.monotonic()
    open_slide(path).close()
    assert time.monotonic() - begin < 20


def test_tiles_made_from_missing_ones_are_averaged_as_by_openslide(tmp_path):
    path = tmp_path / "slide.svs"
    numbers = iter(range(100))
    # Tile 10 of 36 is missing; number 2 of the 9, and 1 of the 4, of the next levels cover it.
    corrupt = {35 + 2, 35 + 9 + 1}

    def encode(tile):
        return slides.jpeg(255 - tile if next(numbers) in corrupt else tile)

    pixels = slides.picture(288, 384)
    slides.write_aperio(path, pixels, missing=[(10,), (), ()], encode=encode)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        for index, size in enumerate(slide.level_dimensions):
            found = slide.read_rgba((0, 0), size, index)
            expected = np.asarray(other.read_region((0, 0), index, size))
            np.testing.assert_array_equal(found[..., 3], expected[..., 3])
            opaque = expected[..., 3] > 0
            difference = abs(found[opaque].astype(int) - expected[opaque])
            assert difference.max() <= (0, 2, 12)[index]


def test_a_plane_whose_compression_is_unknown_is_refused(tmp_path):
    pixels, text = slides.picture(64, 96), slides.aperio_text(96, 64)
    pages = [
        tiffbytes.page(pixels, tiffbytes.deflate, compression=code, description=text)
        for code in (8, 34892)
    ]
    with open_slide(tiffbytes.write(tmp_path / "slide.svs", pages)) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
        with pytest.raises(UnsupportedSlideError, match="not supported"):
            slide.plane(z=1)


def test_pages_of_other_samples_are_no_planes(tmp_path):
    pixels, text = slides.picture(64, 96), slides.aperio_text(96, 64)
    pages = [
        tiffbytes.page(pixels.astype(dtype), tiffbytes.deflate, compression=8, description=text)
        for dtype in ("uint8", "uint16")
    ]
    with open_slide(tiffbytes.write(tmp_path / "slide.svs", pages)) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
        assert (slide.planes.size_z, slide.layout.unselectable_planes) == (1, 1)
        assert slide.layout.problems[1:] == ("1 of 2 planes can't be selected and are not shown.",)


def test_a_label_of_fewer_bits_than_the_slide(tmp_path):
    """White of 16 bits, which the slide's background is, can't be said in 8."""
    text = slides.aperio_text(96, 64)
    pixels, label = slides.picture(64, 96, 3, "uint16"), slides.picture(40, 30)
    pages = [
        tiffbytes.page(pixels, tiffbytes.deflate, compression=8, description=text),
        tiffbytes.page(
            label,
            tiffbytes.deflate,
            compression=8,
            planar=True,
            tile=None,
            subfile_type=1,
            description="Aperio Image Library v11.2.1\r\nlabel 30x40",
        ),
    ]
    path = tiffbytes.write(tmp_path / "slide.svs", pages)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
        np.testing.assert_array_equal(slide.associated_images["label"].read(), label)


@pytest.mark.parametrize(
    ("associated", "names"),
    [
        ([(1, "label 31x20"), (9, "macro 39x20")], {"label", "macro"}),
        ([(0, "label 30x20"), (0, "macro 30x20")], {"label", "macro"}),
        ([(1, ""), (9, "")], {"label", "macro"}),
        ([(9, "macro 39x20")], {"macro"}),
        ([(1, "macro 31x20")], {"macro"}),  # the description counts more than the type
        ([(4, "something 34x20")], set()),
        ([], set()),
    ],
)
def test_associated_images(tmp_path, associated, names):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 200), (), associated=associated)
    with open_slide(path) as slide:
        assert set(slide.associated_images) == names | {"thumbnail"}
        for name, image in slide.associated_images.items():
            assert image.name == name
            pixels = image.read()
            assert pixels.shape == (image.size[1], image.size[0], 3)
            if name != "thumbnail":
                np.testing.assert_array_equal(pixels, slides.picture(*pixels.shape[:2]))


def test_associated_images_equal_openslides(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 200))
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert set(slide.associated_images) == set(other.associated_images)
        for name, image in slide.associated_images.items():
            expected = np.asarray(other.associated_images[name])[..., :3]
            np.testing.assert_array_equal(image.read(), expected)


def slide_with_label(path, encode, compression):
    pixels = slides.picture(60, 90)
    text = slides.aperio_text(90, 60)
    label = tiffbytes.page(
        slides.picture(20, 30),
        encode,
        compression=compression,
        tile=None,
        subfile_type=1,
        description="Aperio\r\nlabel 30x20",
    )
    level = tiffbytes.page(pixels, bytes, description=text)
    thumbnail = tiffbytes.page(pixels[::2, ::2], bytes, tile=None, description=text)
    tiffbytes.write(path, [level, thumbnail, label])
    return pixels


@pytest.mark.parametrize(
    ("encode", "compression"),
    [(bytes, 34661), (lambda _: b"damaged", 7), (lambda _: b"damaged", 5), (lambda _: b"short", 1)],
)
def test_undecodable_associated_image_affects_nothing_else(tmp_path, encode, compression):
    path = tmp_path / "slide.svs"
    pixels = slide_with_label(path, encode, compression)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], pixels)
        np.testing.assert_array_equal(slide.associated_images["thumbnail"].read(), pixels[::2, ::2])
        if "label" in slide.associated_images:
            with pytest.raises(SlideError, match=r"slide\.svs"):
                slide.associated_images["label"].read()


def test_unreadable_associated_image_is_a_problem(tmp_path):
    level = tiffbytes.page(slides.picture(60, 90), bytes, description=slides.aperio_text(90, 60))
    label = tiffbytes.page(slides.picture(20, 30), bytes, tile=None, subfile_type=1)
    label.tags[258] = (tiffbytes.SHORT, (5, 5, 5))
    path = tiffbytes.write(tmp_path / "slide.svs", [level, level, label])
    layout = describe(path)
    assert layout.associated == ()
    assert any(text.startswith("The label image is left out: ") for text in layout.problems)


def test_levels_of_other_channels_are_refused(tmp_path):
    text = slides.aperio_text(90, 60)
    pages = [
        tiffbytes.page(slides.picture(60, 90), bytes, description=text),
        tiffbytes.page(slides.picture(30, 45, 1), bytes, photometric=1, description=text),
    ]
    path = tiffbytes.write(tmp_path / "slide.svs", pages)
    with pytest.raises(CorruptSlideError, match="differ in channels"):
        describe(path)


def test_a_damaged_associated_image_is_named(tmp_path):
    path = tmp_path / "slide.svs"
    slide_with_label(path, lambda _: b"short", 1)
    with open_slide(path) as slide, pytest.raises(SlideError, match="label") as info:
        slide.associated_images["label"].read()
    assert "level -" not in str(info.value)


@pytest.mark.parametrize(
    "fields",
    [
        ("AppMag = 20", "MPP = 0.4990"),
        ("AppMag = 40", "Left = 25.691574", "Filename = CMU-1", "Title = a = b = c"),
        (),
        ("MPP=0.25", "AppMag=40"),
        ("Empty = ", " Spaces  =  kept inside  ", "User = Mü 標本"),
        ("Filtered = 5", "Filtered = 3"),
    ],
)
def test_fields_equal_openslides(tmp_path, fields):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(60, 60), (), fields=fields)
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide:
        found = dict(slide.metadata["aperio"])
        assert found.pop("Header").startswith("Aperio Image Library")
    prefix = "aperio."
    expected = {k.removeprefix(prefix): v for k, v in properties.items() if k.startswith(prefix)}
    assert found == expected


@pytest.mark.parametrize(
    ("text", "mpp"),
    [
        ("0.4990", 0.499),
        ("0,4990", 0.499),
        (" 0.25 ", 0.25),
        ("2.5e-1", 0.25),
        ("0", None),
        ("-0.5", None),
        ("nan", None),
        ("inf", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_mpp(tmp_path, text, mpp):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(60, 60), (), fields=[f"MPP = {text}"])
    with open_slide(path) as slide:
        assert slide.mpp == (None if mpp is None else (mpp, mpp))
        assert slide.objective is None
        assert slide.metadata["mpp"] == (None if mpp is None else [mpp, mpp])


def test_mpp_and_objective_are_openslides(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(60, 60), ())
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide:
        assert slide.mpp == (
            float(properties["openslide.mpp-x"]),
            float(properties["openslide.mpp-y"]),
        )
        assert slide.objective == float(properties["openslide.objective-power"])


@pytest.mark.parametrize(
    ("description", "mpp"),
    [
        ("Aperio", None),
        ("Aperio Image|", None),
        ("Aperio|||=|= =|x", None),
        ("Aperio ü 標本|User = Mü|MPP = 2", 2.0),
        (b"Aperio \xe4|MPP = 1", 1.0),
    ],
)
def test_odd_descriptions_are_read(tmp_path, description, mpp):
    path = tmp_path / "slide.svs"
    pixels = slides.picture(60, 60)
    slides.write_aperio(path, pixels, (), description=description)
    with open_slide(path) as slide:
        assert slide.vendor == "aperio"
        assert slide.levels[0].shape == pixels.shape
        assert slide.mpp == (None if mpp is None else (mpp, mpp))


def test_an_untiled_first_page_is_no_aperio_slide(tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(
        path, slides.picture(60, 60), (), tile=None, description="Aperio Image", metadata=None
    )
    assert describe(path).vendor == "generic-tiff"


@pytest.mark.parametrize("reduced", [3, 1])
def test_planes_of_a_stack_are_no_levels(tmp_path, reduced):
    text = slides.aperio_text(200, 100)
    options = {"compression": 8, "photometric": 2, "description": text}
    planes = [slides.picture(100, 200) // (z + 1) for z in range(3)]
    pages = [tiffbytes.page(pixels, tiffbytes.deflate, **options) for pixels in planes]
    small = [plane[::2, ::2] for plane in planes[:reduced]]
    pages += [tiffbytes.page(pixels, tiffbytes.deflate, **options) for pixels in small]
    path = tiffbytes.write(tmp_path / "slide.svs", pages)
    with open_slide(path) as slide:
        assert slide.level_dimensions == ((200, 100), (100, 50))
        assert (slide.planes.size_z, slide.layout.other_planes) == (reduced, 2)
        for z in range(reduced):
            for level, pixels in zip(slide.plane(z).levels, (planes[z], small[z]), strict=True):
                np.testing.assert_array_equal(level[...], pixels)


def test_parse_description():
    header, fields = parse_description("Aperio Lib \r\n 46000x32914|A = 1 | B=x=y|no pair|A = 2")
    assert header == "Aperio Lib \r\n 46000x32914"
    assert fields == {"A": "2", "B": "x=y"}


def fields_of(tmp_path, fields, **options):
    """Write a slide with these fields and return its layout."""
    path = tmp_path / "slide.svs"
    lines = [f"{key} = {value}" for key, value in fields.items()]
    slides.write_aperio(path, slides.picture(60, 60), (), fields=lines, **options)
    return describe(path)


@pytest.mark.parametrize(
    ("fields", "date"),
    [
        ({"Date": "12/29/09", "Time": "09:59:15"}, "2009-12-29T09:59:15"),
        ({"Date": "05/04/2020", "Time": "08:07:28"}, "2020-05-04T08:07:28"),
        (
            {"Date": "05/04/2020", "Time": "08:07:28", "Time Zone": "GMT+0100"},
            "2020-05-04T08:07:28+01:00",
        ),
        (
            {"Date": "05/04/20", "Time": "08:07:28", "Time Zone": "GMT-05:00"},
            "2020-05-04T08:07:28-05:00",
        ),
        ({"Date": "05/04/20", "Time": "08:07:28", "Time Zone": "CET"}, "2020-05-04T08:07:28"),
        ({"Date": "05/04/20"}, "2020-05-04"),
        ({"Date": "29/12/09", "Time": "09:59:15"}, "29/12/09 09:59:15"),
        ({"Date": "29.12.2009", "Time": "9 Uhr"}, "29.12.2009 9 Uhr"),
        ({"Date": "12/29/09", "Time": "25:59:15"}, "12/29/09 25:59:15"),
        ({"Time": "09:59:15"}, None),
        ({"Date": "", "Time": "09:59:15"}, None),
        ({}, None),
    ],
)
def test_scan_date(tmp_path, fields, date):
    layout = fields_of(tmp_path, fields)
    assert layout.scan_date == date
    assert fields.items() <= layout.metadata["aperio"].items()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"ScanScope ID": "CPAPERIOCS"}, "Aperio ScanScope (CPAPERIOCS)"),
        ({"ScanScope ID": "SS7001", "ScannerType": "AT2"}, "Aperio AT2 (SS7001)"),
        ({"ScannerType": "Aperio GT450"}, "Aperio GT450"),
        ({"ScanScope ID": ""}, None),
        ({}, None),
    ],
)
def test_scanner(tmp_path, fields, name):
    assert fields_of(tmp_path, fields).scanner == name


def test_scanner_by_the_header(tmp_path):
    text = (
        "Aperio Leica Biosystems GT450 v1.0.1 \r\n60x60 [0,0,60x60] (48x64) JPEG/YCC Q=91|"
        "AppMag = 40|Date = 05/04/2020|MPP = 0.263312|ScanScope ID = SN1111|Time = 08:07:28|"
        "Time Zone = GMT+0100"
    )
    layout = fields_of(tmp_path, {}, description=text)
    assert layout.scanner == "Aperio GT450 (SN1111)"
    assert layout.problems == ()


@pytest.mark.parametrize(
    ("fields", "barcode"),
    [
        ({"Barcode": "10045"}, "10045"),
        ({"BarCode ID": "", "Barcode": " 10045 "}, "10045"),
        ({"Title": "10045"}, None),
    ],
)
def test_barcode(tmp_path, fields, barcode):
    assert fields_of(tmp_path, fields).barcode == barcode


GOOD = {"AppMag": "20", "MPP": "0.4990"}


@pytest.mark.parametrize(
    ("fields", "problems"),
    [
        (GOOD, []),
        (GOOD | {"AppMag": "40", "MPP": "0,2520"}, []),
        (GOOD | {"AppMag": "40", "MPP": "0.1725"}, []),
        ({"MPP": "0.4990"}, []),
        ({"AppMag": "20"}, ["MPP.*missing"]),
        *[
            (GOOD | {"MPP": text}, ["not a positive number"])
            for text in ("0", "-1", "nan", "inf", "")
        ],
        (GOOD | {"MPP": "9" * 5000}, ["not a positive number"]),
        (GOOD | {"AppMag": "0"}, ["AppMag.*not a positive number"]),
        (GOOD | {"AppMag": "40"}, ["40 does not match 0.499"]),
        (GOOD | {"MPP": "499"}, ["20 does not match 499"]),
        ({"AppMag": "x", "MPP": "x"}, ["MPP", "AppMag"]),
    ],
)
def test_problems_of_the_scale(tmp_path, fields, problems):
    found = fields_of(tmp_path, fields).problems
    assert len(found) == len(problems)
    for sentence, pattern in zip(found, problems, strict=True):
        assert re.search(pattern, sentence)
        assert sentence.endswith(".")
        assert len(sentence) < 200


@pytest.mark.parametrize(
    ("fields", "mpp", "problems"),
    [
        ("AppMag = 20", 0.5, []),
        ("AppMag = 20|MPP = 0.5001", 0.5001, []),
        ("AppMag = 20|MPP = 0", 0.5, ["not a positive number .*tags are used"]),
        ("AppMag = 40|MPP = 0.25", 0.25, ["0.25 µm according to Aperio's description.*0.5 µm"]),
    ],
)
def test_resolution_tags(tmp_path, fields, mpp, problems):
    tifffile.imwrite(
        path := tmp_path / "slide.svs",
        slides.picture(48, 64),
        tile=(48, 64),
        photometric="rgb",
        description=f"Aperio Image Library v11\r\n64x48 [0,0 64x48]|{fields}",
        resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
        metadata=None,
    )
    found = describe(path)
    assert found.mpp == (mpp, mpp)
    assert len(found.problems) == len(problems)
    assert all(map(re.search, problems, found.problems))


@pytest.mark.parametrize(
    ("area", "contradicts"),
    [
        ("100x90 [0,10 60x60]", False),
        ("100x90 [0,10,60x60]", False),
        ("100x90 [0,10 61x60]", True),
        ("100x90 [0,10 60x59]", True),
        (f"100x90 [0,10 {'9' * 9}x60]", True),
        (f"100x90 [0,10 {'9' * 9999}x60]", False),
        ("46000x32914 (60x60)", False),
    ],
)
def test_contradictory_image_size(tmp_path, area, contradicts):
    text = f"Aperio Image Library v11.2.1\r\n{area} (48x64) JPEG/RGB Q=70|AppMag = 20|MPP = 0.5"
    layout = fields_of(tmp_path, {}, description=text)
    assert ["the slide has 60 x 60" in problem for problem in layout.problems] == [
        True
    ] * contradicts


def test_problems_contain_nothing_private(tmp_path):
    fields = {"User": "jdoe", "Date": "29/12/09", "Barcode": "10045", "MPP": "0", "AppMag": "0"}
    text = " ".join(fields_of(tmp_path, fields).problems)
    assert text
    assert not any(value in text for value in ("jdoe", "29/12/09", "10045"))


@pytest.mark.parametrize(
    ("associated", "names"),
    [
        ([(1, "label 31x20"), (9, "macro 39x20")], {"label", "macro"}),
        ([(9, "macro 39x20"), (1, "label 31x20")], {"label", "macro"}),
        ([(1, ""), (9, "")], {"label", "macro"}),
        ([(0, "label 30x20")], {"label"}),
        ([(1, "46000x32914 -> 31x20 - ;Aperio")], {"thumbnail"}),
    ],
)
def test_a_label_is_no_thumbnail_where_the_thumbnail_is_missing(tmp_path, associated, names):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 200), (), thumbnail=False, associated=associated)
    with open_slide(path) as slide:
        assert set(slide.associated_images) == names


@pytest.mark.parametrize("mpp", ["1e300", "1e-300", "1e6", "1e-9"])
def test_impossible_pixel_sizes_are_not_given(tmp_path, mpp):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 200), (), fields=("AppMag = 20", f"MPP = {mpp}"))
    with open_slide(path) as slide:
        assert slide.mpp is None
        said = " ".join(slide.layout.problems)
        assert re.search("impossible|not a positive number", said)
