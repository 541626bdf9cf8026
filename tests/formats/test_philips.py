import base64
import gc
import json
import pickle
import re
import tracemalloc

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.tiff import philips_xml
from tests import oracles
from tests.writers import philips, slides, tiffbytes

STEPS = (1, 2, 4)
LABEL, MACRO = slides.picture(50, 40), slides.picture(60, 90)
PROFILE = imagecodecs.cms_profile("srgb")


def property_of(slide, name):
    """Look up one of OpenSlide's flat names, such as ``philips.A[0].B``."""
    value = slide.metadata
    for key, index in re.findall(r"([^.\[\]]+)(?:\[(\d+)\])?\.?", name):
        value = value[key][int(index)] if index else value[key]
    return value


def small(path, **options):
    """Write a slide of three levels."""
    return philips.write(path, slides.picture(200, 300), STEPS, tile=64, **options)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A slide of eight levels with sparse tiles, a macro in a page and a label in the XML."""
    path = tmp_path_factory.mktemp("philips") / "slide.tiff"
    philips.write(
        path,
        slides.picture(1000, 1500),
        images=[
            philips.picture_object("MACROIMAGE", philips.base64_jpeg(LABEL)),
            philips.picture_object("LABELIMAGE", philips.base64_jpeg(LABEL)),
        ],
        pages={"Macro": MACRO},
        missing={0: [3, 4, 17, 95], 1: [0, 1], 3: [1], 7: [0]},
    )
    return path


def test_facts_are_openslides(eight):
    with open_slide(eight) as slide, oracles.openslide.OpenSlide(eight) as other:
        properties = other.properties
        assert slide.vendor == properties["openslide.vendor"] == "philips"
        assert slide.level_count == other.level_count == 8
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
        assert slide.objective == float(properties["openslide.objective-power"])
        assert slide.metadata["barcode"] == properties["openslide.barcode"]
        assert slide.metadata["scanner"] == "PHILIPS UFS Scanner"
        assert slide.metadata["scan_date"] == "2015-07-06T08:18:55"
        assert slide.layout.problems == ()


def test_only_tiles_of_the_true_size_are_kept(eight):
    with open_slide(eight) as slide:
        for level in slide.layout.levels:
            assert (level.grid.rows, level.grid.columns) == (
                -(-level.height // 128),
                -(-level.width // 128),
            )


def test_pixels_are_openslides(eight):
    with open_slide(eight) as slide, oracles.openslide.OpenSlide(eight) as other:
        for index, size in enumerate(other.level_dimensions):
            expected = oracles.opaque(other.read_region((0, 0), index, size))
            np.testing.assert_array_equal(slide.levels[index][...], expected)


@pytest.mark.parametrize(
    ("location", "size", "level"),
    [
        ((300, 100), (260, 200), 0),
        ((1400, 900), (200, 200), 0),
        ((-128, -64), (300, 300), 1),
        ((256, 256), (90, 60), 4),
        ((1408, 896), (20, 20), 7),
    ],
)
def test_regions_are_openslides(eight, location, size, level):
    with open_slide(eight) as slide, oracles.openslide.OpenSlide(eight) as other:
        expected = oracles.opaque(other.read_region(location, level, size))
        np.testing.assert_array_equal(slide.read_region(location, size, level), expected)


def test_missing_tiles_are_white_at_every_level(eight):
    with open_slide(eight) as slide:
        assert (slide.read_region((3 * 128, 0), (256, 128)) == 255).all()
        assert (slide.levels[1][:128, :256] == 255).all()
        assert (slide.levels[7][...] == 255).all()


def test_every_property_of_openslides_is_in_the_metadata(eight):
    properties = {
        name: value
        for name, value in oracles.openslide_properties(eight).items()
        if name.startswith("philips.")
    }
    assert "philips.PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE[7].DICOM_PIXEL_SPACING" in properties
    with open_slide(eight) as slide:
        assert {name: property_of(slide, name) for name in properties} == properties


def test_last_of_repeated_attributes_is_used_as_in_openslide(tmp_path):
    path = tmp_path / "slide.tiff"
    main = philips.whole_slide_image(
        philips.representations(philips.spacings(STEPS), [(300, 200)]),
        philips.attribute("DICOM_MANUFACTURER", "of the image"),
        philips.attribute("PIM_DP_UFS_INTERFACE_VERSION", "of the image"),
    )
    small(path, xml=philips.description(main))
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide:
        for name in ("philips.DICOM_MANUFACTURER", "philips.PIM_DP_UFS_INTERFACE_VERSION"):
            assert property_of(slide, name) == properties[name]
        assert slide.metadata["scanner"] == "of the image UFS Scanner"


def test_metadata_beyond_openslide(eight):
    with open_slide(eight) as slide:
        found = slide.metadata["philips"]
        assert found["DICOM_PIXEL_SPACING_mm"] == [philips.ROW, philips.COLUMN]
        entries = found["PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE"]
        assert [entry["DICOM_PIXEL_SPACING_mm"][0] for entry in entries[:2]] == [
            0.000227273,
            0.000454546,
        ]
        assert found["UFS_IMAGE_GENERAL_HEADERS"] == [{"UFS_IMAGE_NUMBER_OF_BLOCKS": "3"}]
        assert found["PIM_DP_SCANNED_IMAGES"] == [
            {"PIM_DP_IMAGE_TYPE": kind, "DICOM_MANUFACTURER": f"maker of the {kind}"}
            for kind in ("MACROIMAGE", "LABELIMAGE")
        ]


def test_no_picture_is_in_the_metadata(eight):
    with open_slide(eight) as slide:
        text = json.dumps(slide.metadata)
    assert philips.base64_jpeg(LABEL)[:40] not in text
    assert "<DataObject" not in text
    assert json.loads(text)["tiff"] == {
        "Software": "Philips DP v1.0",
        "ResolutionUnit": "inch",
    }


@pytest.mark.parametrize(
    ("pages", "images"),
    [
        ({"Macro": MACRO, "Label": LABEL}, {}),
        ({"Macro image": MACRO}, {"LABELIMAGE": LABEL}),
        ({"Label": LABEL}, {"MACROIMAGE": MACRO, "LABELIMAGE": MACRO}),
        ({}, {"MACROIMAGE": MACRO, "LABELIMAGE": LABEL}),
        ({}, {"MACROIMAGE": MACRO[..., :1]}),
        ({"Thumbnail": LABEL}, {"OTHER": LABEL}),
        ({}, {}),
    ],
)
def test_associated_images_are_openslides(tmp_path, pages, images):
    path = tmp_path / "slide.tiff"
    objects = [
        philips.picture_object(kind, philips.base64_jpeg(pixels)) for kind, pixels in images.items()
    ]
    small(path, pages=pages, images=objects)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert set(slide.associated_images) == set(other.associated_images)
        for name, image in slide.associated_images.items():
            expected = np.asarray(other.associated_images[name])[..., :3]
            assert image.size == other.associated_images[name].size
            pixels = image.read()
            np.testing.assert_array_equal(np.broadcast_to(pixels, expected.shape), expected)
        assert slide.layout.problems == ()


def test_an_image_of_the_xml_is_the_jpeg_that_was_written(tmp_path):
    path = tmp_path / "slide.tiff"
    text = philips.base64_jpeg(LABEL)
    small(path, images=[philips.picture_object("LABELIMAGE", text)])
    expected = imagecodecs.jpeg8_decode(base64.b64decode(text))
    with open_slide(path) as slide:
        image = slide.associated_images["label"]
        for _ in range(2):
            np.testing.assert_array_equal(image.read(), expected)
            slide.release()
        copy = pickle.loads(pickle.dumps(slide))
        np.testing.assert_array_equal(copy.associated_images["label"].read(), expected)
        copy.close()
    with pytest.raises(SlideError, match="closed"):
        image.read()


@pytest.mark.parametrize(
    "data",
    [
        "",
        "not base64",
        "AAAA",
        "\N{LATIN SMALL LETTER A WITH DIAERESIS}",
        base64.b64encode(b"\xff\xd8\xff").decode(),
        base64.b64encode(b"\xff\xd8" + b"\xff\x01" * 5000).decode(),
        # a frame of 65535 x 65535 pixels, and one of none
        base64.b64encode(b"\xff\xd8\xff\xc0\0\x11\x08" + b"\xff" * 4 + b"\x03" + bytes(9)).decode(),
        base64.b64encode(b"\xff\xd8\xff\xc0\0\x11\x08" + bytes(4) + b"\x03" + bytes(9)).decode(),
        base64.b64encode(imagecodecs.png_encode(LABEL)).decode(),
        # a megabyte of comments before the frame
        base64.b64encode(
            b"\xff\xd8"
            + 17 * (b"\xff\xfe\xff\xff" + bytes(65533))
            + base64.b64decode(philips.base64_jpeg(LABEL))[2:]
        ).decode(),
    ],
)
def test_damaged_image_in_the_xml_is_left_out(tmp_path, data):
    path = tmp_path / "slide.tiff"
    images = [
        philips.picture_object("LABELIMAGE", data),
        philips.picture_object("MACROIMAGE", philips.base64_jpeg(MACRO)),
    ]
    levels = small(path, images=images)
    with open_slide(path) as slide:
        assert set(slide.associated_images) == {"macro"}
        assert slide.level_dimensions[2] == levels[2].shape[1::-1]
        (problem,) = slide.layout.problems
        assert problem.startswith(f"The label image in the XML of '{path.name}'")


def test_truncated_jpeg_is_named_on_reading(tmp_path):
    path = tmp_path / "slide.tiff"
    data = base64.b64decode(philips.base64_jpeg(LABEL))[:-60]
    small(path, images=[philips.picture_object("LABELIMAGE", base64.b64encode(data).decode())])
    with open_slide(path) as slide, pytest.raises(SlideError, match="the label image"):
        slide.associated_images["label"].read()


def test_a_broken_page_of_an_image_is_left_out(tmp_path):
    path = tmp_path / "slide.tiff"
    small(path, pages={"Label": LABEL, "Macro": MACRO})
    with open_slide(path) as slide:
        assert set(slide.associated_images) == {"label", "macro"}
    content = path.read_bytes()
    place = content.index(b"Label\0")
    size = tiffbytes.struct.pack("<HHII", 257, 4, 1, LABEL.shape[0])
    broken = content.replace(size, tiffbytes.struct.pack("<HHII", 257, 4, 1, 1 << 31))
    assert broken != content
    assert place > 0
    path.write_bytes(broken)
    with open_slide(path) as slide:
        assert set(slide.associated_images) == {"macro"}
        assert any("label image is left out" in problem for problem in slide.layout.problems)


@pytest.mark.parametrize(
    "derivation",
    [
        "tiff-useBigTIFF=1-useRgb=0-levels=40,10000,10001-q80",
        "tiff-levels=10003,10002,10000-processing=0-q80",
        'tiff-q80-sourceFilename="a -levels=20 - b.ndpi"',
        "sourceFilename=a-levels=20",
        "levels=20-levels=40",
        "levels=0",
        "levels=201",
        "levels=200",
        "levels",
        "PHILIPS UFS V1.6.6186 | Quality=2 | DWT=1 | Compressor=16",
        "",
    ],
)
def test_the_objective_is_openslides(tmp_path, derivation):
    path = tmp_path / "slide.tiff"
    texts = philips.representations(philips.spacings(STEPS), [(300, 200)])
    small(
        path,
        xml=philips.description(philips.whole_slide_image(texts, derivation=derivation)),
    )
    expected = oracles.openslide_properties(path).get("openslide.objective-power")
    with open_slide(path) as slide:
        assert slide.objective == (None if expected is None else float(expected))


@pytest.mark.parametrize("derivation", ["levels=", "levels=,40", "levels=x", "levels=1.5"])
def test_impossible_objective_is_omitted(tmp_path, derivation):
    path = tmp_path / "slide.tiff"
    small(path, xml=philips.description(philips.whole_slide_image(derivation=derivation)))
    assert describe(path).objective is None


@pytest.mark.parametrize(
    "text",
    [
        "&quot;0.000226891&quot; &quot;0.000226907&quot;",
        "0.00025 0.0005",
        "&quot;2.5e-4&quot; &quot;0,00025&quot;",
        "&quot;0.1&quot; &quot;0.3&quot;",
    ],
)
def test_mpp_is_openslides(tmp_path, text):
    path = tmp_path / "slide.tiff"
    main = philips.whole_slide_image(
        philips.attribute("DICOM_PIXEL_SPACING", text),
        philips.representations(philips.spacings(STEPS), [(300, 200)]),
    )
    small(path, xml=philips.description(main))
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide:
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")


BAD_SPACINGS = ["", "0.1", "0 0", "-1 1", "nan 1", "inf 1", "1e999 1", "a b", "1 2 3", "1e300 1"]


@pytest.mark.parametrize("text", BAD_SPACINGS)
def test_impossible_spacing_gives_no_mpp(tmp_path, text):
    path = tmp_path / "slide.tiff"
    main = philips.whole_slide_image(
        philips.attribute("DICOM_PIXEL_SPACING", text),
        philips.representations(philips.spacings(STEPS), [(300, 200)]),
    )
    levels = small(path, xml=philips.description(main))
    with open_slide(path) as slide:
        assert slide.mpp is None
        assert slide.metadata["philips"]["DICOM_PIXEL_SPACING"] == text
        assert "DICOM_PIXEL_SPACING_mm" not in slide.metadata["philips"]
        assert [level.shape for level in slide.levels] == [level.shape for level in levels]
        (problem,) = slide.layout.problems
        assert "pixel spacing" in problem
        assert f"'{path.name}'" in problem


@pytest.mark.parametrize("step", [(2.49, 2.49), (2, 2.98), (2.4, 1.5), (2.4999, 2.5)])
def test_downsamples_are_rounded_as_openslide_does(tmp_path, step):
    path = tmp_path / "slide.tiff"
    texts = ["0.001 0.001", f"{step[0] / 1000} {step[1] / 1000}"]
    philips.write(path, slides.picture(201, 333), (1, 2), tile=64, level_spacings=texts)
    with open_slide(path) as slide:
        dimensions, downsamples = oracles.openslide_shape(path)
        assert slide.level_dimensions == dimensions
        assert slide.level_downsamples == downsamples == (1, 2)


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["0.001 0.001"],
        ["0.001 0.001"] * 3,
        ["0.001 0.001", "0.002 0.002", "0.004 0.004", "0.008 0.008"],
        ["0.004 0.004", "0.002 0.002", "0.001 0.001"],
        ["0.001 0.001", "0.002 0.002", "1e9 1e9"],
        ["1e-300 1e-300", "1e9 1e9", "1e9 1e9"],
        ["0 0", "0.002 0.002", "0.004 0.004"],
        ["nan nan", "0.002 0.002", "0.004 0.004"],
        ["0.001 0.001", "-0.002 -0.002", "0.004 0.004"],
        ["0.001 0.001", "zwei", "0.004 0.004"],
        # levels that would be larger than they are stored
        ["0.002 0.002", "0.0021 0.0021", "0.006 0.006"],
    ],
)
def test_levels_with_impossible_spacings_keep_padding(tmp_path, texts):
    path = tmp_path / "slide.tiff"
    small(path, level_spacings=texts)
    with open_slide(path) as slide:
        assert slide.level_dimensions == ((300, 200), (192, 128), (128, 64))
        (problem,) = slide.layout.problems
        assert "padding" in problem
        assert f"'{path.name}'" in problem
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], oracles.tifffile_page(path, index))


def test_levels_of_one_size_are_shown_once(tmp_path):
    path = tmp_path / "slide.tiff"
    texts = ["1 1", "2 2", "2 2"]
    philips.write(path, slides.picture(64, 64), (1, 2, 4), tile=64, level_spacings=texts)
    with open_slide(path) as slide:
        assert slide.level_dimensions == ((64, 64),)
        assert len(slide.layout.problems) == 1


BROKEN = [
    "",
    "no XML",
    "<DataObject",
    '<DataObject ObjectType="DPUfsImport">',
    philips.description()[:-5],
    philips.description("<DataObject>\0</DataObject>"),
    philips.description("&undefined;"),
    '<!DOCTYPE a [<!ENTITY a "b">]>' + philips.description("&a;"),
    '<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/hostname">]>' + philips.description("&a;"),
    "<other/>",
    '<DataObject ObjectType="other"/>',
    philips.description("<Array>" * 300 + "</Array>" * 300),
    philips.description("<a/>" * 300_000),
    b'<DataObject ObjectType="DPUfsImport"><Attribute Name="\xff\xfe">\x01</Attribute>',
]


@pytest.mark.parametrize("xml", BROKEN, ids=range(len(BROKEN)))
def test_a_slide_with_broken_xml_opens_with_padding(tmp_path, xml):
    path = tmp_path / "slide.tiff"
    small(path, xml=xml, pages={"Macro": MACRO})
    with open_slide(path) as slide:
        assert slide.vendor == "philips"
        assert slide.level_dimensions == ((300, 200), (192, 128), (128, 64))
        assert set(slide.associated_images) == {"macro"}
        assert slide.mpp is None
        assert slide.metadata["philips"] == {}
        (problem,) = slide.layout.problems
        assert "XML" in problem
        assert f"'{path.name}'" in problem
        np.testing.assert_array_equal(slide.levels[1][...], oracles.tifffile_page(path, 1))


def test_levels_not_smaller_are_left_out_without_spacings(tmp_path):
    path = tmp_path / "slide.tiff"
    philips.write(path, slides.picture(256, 256), (1, 4, 8), tile=64, xml="")
    with open_slide(path) as slide:
        assert slide.level_dimensions == ((256, 256), (64, 64))
    philips.write(path, slides.picture(256, 256), (1, 4, 8), tile=64)
    with open_slide(path) as slide:
        assert slide.level_dimensions == ((256, 256), (64, 64), (32, 32))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "0 whole-slide images"),
        ([philips.picture_object("LABELIMAGE", philips.base64_jpeg(LABEL))], "0 whole"),
        ([philips.whole_slide_image(philips.spacing())] * 2, "2 whole-slide images"),
    ],
)
def test_another_count_of_whole_slide_images_is_a_problem(tmp_path, images, words):
    path = tmp_path / "slide.tiff"
    small(path, xml=philips.description(*images))
    with open_slide(path) as slide:
        assert words in slide.layout.problems[0]
        assert slide.level_count == 3


@pytest.mark.parametrize(
    ("barcode", "expected"),
    [
        ("", None),
        ("MzMxMTk0MA==", "3311940"),
        ("\n  MzMx\nMTk0MA==\n", "3311940"),
        (base64.b64encode("Präparat 標本".encode()).decode(), "Präparat 標本"),
    ],
)
def test_the_barcode_is_openslides(tmp_path, barcode, expected):
    path = tmp_path / "slide.tiff"
    texts = philips.representations(philips.spacings(STEPS), [(300, 200)])
    small(path, xml=philips.description(philips.whole_slide_image(texts), barcode=barcode))
    with open_slide(path) as slide:
        assert slide.metadata["barcode"] == expected
        assert slide.layout.problems == ()
    assert oracles.openslide_properties(path)["openslide.barcode"] == (expected or "")


@pytest.mark.parametrize("barcode", ["3311940", "!", "ä", "gA==", "A==="])
def test_barcode_that_is_not_base64_is_a_problem(tmp_path, barcode):
    path = tmp_path / "slide.tiff"
    texts = philips.representations(philips.spacings(STEPS), [(300, 200)])
    small(path, xml=philips.description(philips.whole_slide_image(texts), barcode=barcode))
    with open_slide(path) as slide:
        assert slide.metadata["barcode"] is None
        assert slide.metadata["philips"]["PIM_DP_UFS_BARCODE"] == barcode
        (problem,) = slide.layout.problems
        assert "barcode" in problem


@pytest.mark.parametrize("nested", [False, True])
def test_the_icc_profile_of_the_xml(tmp_path, nested):
    path = tmp_path / "slide.tiff"
    profile = philips.attribute("DICOM_ICCPROFILE", base64.encodebytes(PROFILE).decode())
    if nested:
        profile = philips.sequence(
            "DP_COLOR_MANAGEMENT", philips.data_object("DPColorManagement", profile)
        )
    small(path, xml=philips.description(philips.whole_slide_image(profile)))
    with open_slide(path) as slide:
        assert slide.icc_profile == PROFILE
        assert slide.metadata["icc_profile"] is True


def test_icc_profile_of_the_tag_takes_precedence(tmp_path):
    path = tmp_path / "slide.tiff"
    other = imagecodecs.cms_profile("gray")
    text = philips.attribute("DICOM_ICCPROFILE", base64.b64encode(other).decode())
    small(
        path,
        xml=philips.description(philips.whole_slide_image(text)),
        more={34675: (tiffbytes.UNDEFINED, PROFILE)},
    )
    with open_slide(path) as slide:
        assert slide.icc_profile == PROFILE


@pytest.mark.parametrize("text", ["", "no base64 at all", "AAAA"])
def test_no_icc_profile(tmp_path, text):
    path = tmp_path / "slide.tiff"
    small(path, xml=philips.description(more=philips.attribute("DICOM_ICCPROFILE", text)))
    with open_slide(path) as slide:
        assert slide.icc_profile is None


@pytest.mark.parametrize(
    ("software", "xml", "vendor"),
    [
        ("Philips DP v1.0", None, "philips"),
        ("Philips", None, "philips"),
        ("Philips IntelliSite", None, "philips"),
        ("Philips something", "<other/>", "generic-tiff"),
        ("philips DP", None, "generic-tiff"),
        ("Other", None, "generic-tiff"),
    ],
)
def test_the_vendor_is_openslides(tmp_path, software, xml, vendor):
    path = tmp_path / "slide.tiff"
    small(path, software=software, xml=xml)
    assert describe(path).vendor == vendor
    assert oracles.openslide_properties(path)["openslide.vendor"] == vendor


def traced(run):
    """Return what `run` returns, and how many bytes it needed at most, and keeps."""
    gc.collect()
    tracemalloc.start()
    try:
        result = run()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, peak, kept


def test_overlong_text_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(philips_xml, "LONGEST_PICTURE", 1 << 20)
    path = tmp_path / "slide.tiff"
    size = 8 << 20
    main = philips.whole_slide_image(
        philips.representations(philips.spacings(STEPS), [(300, 200)]),
        philips.attribute("DICOM_BITS_STORED", "8" * size),
        philips.attribute("N" * size, "8"),
    )
    label = philips.picture_object("LABELIMAGE", "A" * size)
    xml = philips.description(main, label)
    small(path, xml=xml)
    layout, _, kept = traced(lambda: describe(path))
    assert kept < 1 << 20
    assert layout.associated == ()
    (problem,) = layout.problems
    assert "DICOM_BITS_STORED" in problem
    assert "PIM_DP_IMAGE_DATA" in problem
    assert len(problem) < 1000


@pytest.mark.parametrize(
    "more",
    [
        philips.attribute("A", "8" * (2 << 20)),
        philips.attribute("A", "8\n" * (1 << 20)),
        philips.attribute("A" * (2 << 20), "8"),
        "<a/>" * 25_000,
        philips.attribute("A", "<a/>" * 25_000),
    ],
    ids=range(5),
)
def test_to_read_xml_costs_a_few_times_its_size(more):
    xml = philips.description(more=more)
    found, peak, kept = traced(lambda: philips_xml.parse(xml))
    assert peak < 8 * len(xml)
    assert kept < 1 << 18
    assert found.attributes["DICOM_MANUFACTURER"] == "PHILIPS"


def test_xml_of_any_length_is_not_read(monkeypatch):
    xml = philips.description()
    monkeypatch.setattr(philips_xml, "LONGEST_XML", len(xml))
    philips_xml.parse(xml)
    with pytest.raises(ValueError, match="too long"):
        philips_xml.parse(xml + " ")


NAMES = st.sampled_from(
    [
        "PIM_DP_SCANNED_IMAGES",
        "PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE",
        "DP_COLOR_MANAGEMENT",
        "DICOM_PIXEL_SPACING",
        "DICOM_PIXEL_SPACING_mm",
        "DICOM_ICCPROFILE",
        "DICOM_MANUFACTURER",
        "DICOM_DERIVATION_DESCRIPTION",
        "PIM_DP_IMAGE_TYPE",
        "PIM_DP_IMAGE_DATA",
        "PIM_DP_UFS_BARCODE",
        "",
    ]
)
VALUES = st.sampled_from(
    ["", "WSI", "LABELIMAGE", "0.1 0.1", "nan 0", "1e-320 1e308", "AAAA", "levels=40", "x"]
) | st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), max_size=8).map(
    philips.escape
)
TREES = st.recursive(
    st.builds(philips.attribute, NAMES, VALUES),
    lambda inner: (
        st.builds(
            lambda name, parts: philips.sequence(
                name, philips.data_object("DPScannedImage", *parts)
            ),
            NAMES,
            st.lists(inner, max_size=4),
        )
        | st.builds(philips.attribute, NAMES, inner)
        | inner.map(lambda part: f"<Array>{part}</Array>")
    ),
    max_leaves=12,
)


@given(more=TREES, scanned=st.lists(TREES, max_size=3))
def test_no_xml_keeps_a_slide_from_opening(tmp_path, more, scanned):
    path = tmp_path / "slide.tiff"
    main = philips.data_object("DPScannedImage", *scanned)
    philips.write(
        path, slides.picture(64, 64), (1, 2), tile=32, xml=philips.description(main, more=more)
    )
    with open_slide(path) as slide:
        assert slide.vendor == "philips"
        assert slide.level_dimensions[0] == (64, 64)
        assert json.loads(json.dumps(slide.metadata, allow_nan=False)) == slide.metadata
        assert all(path.name in problem for problem in slide.layout.problems)
