"""Lists of slides, one per channel (NDPIS and AFI), against the slides that they list."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import tifffile

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideNotFoundError,
    TileError,
    UnsupportedSlideError,
)
from tests.writers import ndpi, slides, tiffbytes

NDPIS = "[NanoZoomer Digital Pathology Image Set]\r\nNoImages={}\r\n"
GRAY = {258: (ndpi.SHORT, 8), 262: (ndpi.SHORT, 1), 277: (ndpi.SHORT, 1)}
DYES = {"DAPI 2 (387)": 455.0, "FITC 2 (485)": 530.0, "TRITC 2 (560)": 610.0}


def write_ndpis(path, names):
    text = NDPIS.format(len(names))
    text += "".join(f"Image{index}={name}\r\n" for index, name in enumerate(names))
    path.write_text(text, newline="")
    return path


def write_afi(path, names):
    images = "".join(f"<Image><Path>{name}</Path><ID>7</ID></Image>" for name in names)
    path.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n<ImageList>{images}</ImageList>')
    return path


def ndpi_set(folder, kind="gray", sides=(384, 320), planes=(0,)):
    """Write three slides and their list; the samples of RGB slides differ."""
    width, height = sides
    for number, (dye, wavelength) in enumerate(DYES.items()):
        pages = []
        for plane in planes:
            pixels = np.roll(slides.picture(height, width), 40 * number + plane, axis=1)
            tags = {65434: (ndpi.ASCII, dye), 65451: (ndpi.FLOAT, wavelength)}
            if kind == "gray":
                pixels, tags = pixels[..., number], tags | GRAY
            for step, blocks in ((1, 12), (2, 0)):
                level = slides.average(pixels, step) if step > 1 else pixels
                pages.append(ndpi.level(level, blocks, plane=plane, tags=tags))
        pages.append(ndpi.level(slides.picture(40, 120), lens=-1.0))
        ndpi.write(folder / f"x-{dye}.ndpi", pages)
    return write_ndpis(folder / "x.ndpis", [f"x-{dye}.ndpi" for dye in DYES])


def afi_set(folder, dtype="uint16", **options):
    names = [f"Meier_{dye}.svs" for dye in ("DAPI", "CD3")]
    for number, name in enumerate(names):
        pixels = slides.picture(200, 300, 1, dtype) + np.array(number, dtype)
        encoding = {"encode": tiffbytes.deflate, "compression": 8}
        slides.write_aperio(folder / name, pixels, (2,), **encoding, **options)
    return write_afi(folder / "x.afi", names)


def assert_same(path, members, samples=None):
    """Compare all levels of a list, and regions of them, with those of the listed slides."""
    with open_slide(path, "cpu") as slide:
        for channel, name in enumerate(members):
            with open_slide(path.with_name(name), "cpu") as member:
                assert slide.level_dimensions == member.level_dimensions
                for level, other in zip(slide.levels, member.levels, strict=True):
                    expected = other[...]
                    sample = 0 if samples is None else samples[channel]
                    np.testing.assert_array_equal(level[..., channel], expected[..., sample])
                    part = np.s_[3:71, 20:91]
                    np.testing.assert_array_equal(
                        level[part][..., channel], expected[part][..., sample]
                    )
        return slide.layout


def test_gray_ndpis(tmp_path):
    path = ndpi_set(tmp_path)
    layout = assert_same(path, [f"x-{dye}.ndpi" for dye in DYES])
    assert [channel.name for channel in layout.channels] == [*DYES]
    assert not layout.rgb
    first = describe(tmp_path / f"x-{next(iter(DYES))}.ndpi")
    assert (layout.mpp, layout.objective, layout.metadata) == (
        first.mpp,
        first.objective,
        first.metadata,
    )
    with open_slide(path, "cpu") as slide, open_slide(first.path, "cpu") as member:
        expected = member.associated_images["macro"].read()
        np.testing.assert_array_equal(slide.associated_images["macro"].read(), expected)


def test_sample_of_rgb_ndpi_follows_from_its_wavelength(tmp_path):
    layout = assert_same(ndpi_set(tmp_path, "rgb"), [f"x-{dye}.ndpi" for dye in DYES], (2, 1, 0))
    assert layout.problems == ()


def test_rgb_without_wavelength_is_a_problem(tmp_path):
    for shift, name in enumerate("ab"):
        pixels = np.roll(slides.picture(64, 96), shift, axis=1)
        ndpi.write(tmp_path / f"{name}.ndpi", [ndpi.level(pixels)])
    path = write_ndpis(tmp_path / "x.ndpis", ["a.ndpi", "b.ndpi"])
    layout = assert_same(path, ["a.ndpi"] * 3 + ["b.ndpi"] * 3, (0, 1, 2) * 2)
    assert layout.problems[0].startswith("Slide 1 is stored in color without a wavelength")
    assert [(channel.name, channel.color, channel.visible) for channel in layout.channels] == [
        (f"channel {number} {name}", color, number == 0)
        for number in (0, 1)
        for name, color in (("red", "#ff0000"), ("green", "#00ff00"), ("blue", "#0000ff"))
    ]


@pytest.mark.parametrize("mark", ["", ";"])
def test_sample_follows_from_transmittances(tmp_path, mark):
    """As in Bio-Formats; `mark` starts the names in files of some scanners."""
    for lit, name in zip("BGRx", "abcd", strict=True):
        shares = {letter: "10%" if letter == lit else "-" for letter in "RGB"}
        text = "".join(f"{mark}Transmittance{key}={share}\r\n" for key, share in shares.items())
        tags = {65449: (ndpi.ASCII, text)}
        ndpi.write(tmp_path / name, [ndpi.level(slides.picture(64, 96), tags=tags)])
    path = write_ndpis(tmp_path / "x.ndpis", ["a", "b", "c", "d"])
    layout = assert_same(path, ["a", "b", "c", "d", "d", "d"], (2, 1, 0, 0, 1, 2))
    assert len(layout.problems) == 1


def test_list_of_one_slide_is_that_slide(tmp_path):
    slides.write_aperio(tmp_path / "a.svs", slides.picture(60, 60), ())
    path = write_afi(tmp_path / "x.afi", ["a.svs"])
    with open_slide(path, "cpu") as slide, open_slide(tmp_path / "a.svs", "cpu") as member:
        np.testing.assert_array_equal(slide.levels[0][...], member.levels[0][...])
        assert slide.layout.rgb
        assert slide.path == str(path)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_afi(tmp_path, dtype):
    layout = assert_same(afi_set(tmp_path, dtype), ["Meier_DAPI.svs", "Meier_CD3.svs"])
    assert [channel.name for channel in layout.channels] == ["DAPI", "CD3"]
    assert layout.mpp == (0.499, 0.499)


def test_missing_tiles_of_a_channel(tmp_path):
    path = afi_set(tmp_path, missing=({1, 2}, {0}))
    with open_slide(path, "cpu") as slide, open_slide(tmp_path / "Meier_CD3.svs", "cpu") as member:
        np.testing.assert_array_equal(slide.levels[0][..., 1], member.levels[0][..., 0])
        assert slide.levels[1].computed  # a mosaic can't average single tiles
        np.testing.assert_array_equal(slide.levels[1][:40, :40, 1], member.levels[1][:40, :40, 0])


def test_focal_planes(tmp_path):
    path = ndpi_set(tmp_path, planes=(-2000, 0, 2000))
    with open_slide(path, "cpu") as slide:
        assert slide.planes.size_z == 3
        for z in range(3):
            for channel, dye in enumerate(DYES):
                with open_slide(tmp_path / f"x-{dye}.ndpi", "cpu") as member:
                    np.testing.assert_array_equal(
                        slide.plane(z=z).levels[0][..., channel],
                        member.plane(z=z).levels[0][..., 0],
                    )


def _corner(slide):
    return slide.levels[0][:9, :9]


def test_other_process(tmp_path):
    path = afi_set(tmp_path)
    with open_slide(path, "cpu") as slide, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        data = pickle.dumps(slide)
        assert b"Meier" not in data
        np.testing.assert_array_equal(pool.submit(_corner, slide).result(60), _corner(slide))


def test_tile_beyond_its_slides_end_is_not_read_from_the_next_slide(tmp_path):
    pixels = slides.picture(64, 64, 1)
    for name, more in (("a.svs", {324: (tiffbytes.LONG, [8, 6000])}), ("b.svs", {})):
        text = slides.aperio_text(64, 64, "MPP = 0.5")
        page = tiffbytes.page(pixels, bytes, tile=(32, 64), description=text, more=more)
        tiffbytes.write(tmp_path / name, [page])
    assert (tmp_path / "a.svs").stat().st_size < 6000
    path = write_afi(tmp_path / "x.afi", ["a.svs", "b.svs"])
    with open_slide(path, "cpu") as slide:
        assert slide.layout.problems[0].startswith("Slide 1: The file is truncated")
        with pytest.raises(TileError, match="truncated"):
            slide.levels[0][...]
        np.testing.assert_array_equal(slide.level_array(0, 1)[...], pixels[..., 0])


REFUSED = {
    "a folder above": (["../x_DAPI.svs"], "another folder"),
    "the parent": ([".."], "another folder"),
    "a backslash": (["..\\a.svs"], "another folder"),
    "a drive": (["C:a.svs"], "another folder"),
    "an absolute path": (["/etc/passwd"], "another folder"),
    "no name": ([""], "empty or names another folder"),
    "nothing": ([], "lists no slides"),
    "a slide twice": (["Meier_DAPI.svs"] * 2, "one of them twice"),
    "a missing slide": (["Meier_DAPI.svs", "gone.svs"], "no file '.*gone.svs'"),
    "the list itself": (["Meier_DAPI.svs", "x.afi"], "x.afi"),
    "another vendor": (["Meier_DAPI.svs", "plain.tif"], "not a slide of the same vendor"),
    "another size": (["Meier_DAPI.svs", "small.svs"], "differ in their sizes"),
    "another type": (["Meier_DAPI.svs", "bytes.svs"], "differ in their sizes"),
    "a folder": (["Meier_DAPI.svs", "folder.svs"], "not a regular file"),
    "too many": (["Meier_DAPI.svs"] * 3000, "longer than any list"),
}


@pytest.mark.parametrize(("names", "said"), REFUSED.values(), ids=REFUSED)
def test_hostile_afi(tmp_path, names, said):
    path = afi_set(tmp_path)
    deflate = {"encode": tiffbytes.deflate, "compression": 8}
    gray = slides.picture(200, 300, 1, "uint16")
    slides.write_aperio(tmp_path / "small.svs", gray[:100], (2,), **deflate)
    slides.write_aperio(tmp_path / "bytes.svs", gray.astype(np.uint8), (2,), **deflate)
    tifffile.imwrite(tmp_path / "plain.tif", gray[..., 0], tile=(64, 64))
    (tmp_path / "folder.svs").mkdir()
    write_afi(path, names)
    with pytest.raises(SlideError, match=said):
        describe(path)


TEXTS = {
    "no images": (NDPIS.format(0), CorruptSlideError),
    "too few": (NDPIS.format(3) + "Image0=a.ndpi\r\n", CorruptSlideError),
    "a huge number": (NDPIS.format(10**30) + "Image0=a.ndpi\r\n", CorruptSlideError),
    "no text": (NDPIS.format(1) + "Image0=\r\n", UnsupportedSlideError),
    "a null": (NDPIS.format(1) + "Image0=a\0.ndpi\r\n", UnsupportedSlideError),
    "missing": (NDPIS.format(1) + "Image0=a.ndpi\r\n", SlideNotFoundError),
    "truncated": (NDPIS[:30], NotASlideError),
    "half": ("[NanoZoomer Digital Pathology Image Set]", CorruptSlideError),
    "XML truncated": ("<ImageList><Image>", CorruptSlideError),
    "entities": ('<!DOCTYPE a [<!ENTITY b "b">]><ImageList>&b;</ImageList>', NotASlideError),
    "entity": ("<ImageList><Image><Path>&b;</Path></Image></ImageList>", CorruptSlideError),
}


@pytest.mark.parametrize(("text", "error"), TEXTS.values(), ids=TEXTS)
def test_hostile_text(tmp_path, text, error):
    path = tmp_path / "x.ndpis"
    path.write_text(text)
    with pytest.raises(error, match=r"x\.ndpis|a\.ndpi") as caught:
        describe(path)
    assert str(caught.value).endswith(".")


def test_changed_list_is_noticed(tmp_path):
    path = ndpi_set(tmp_path, planes=(0, 2000))
    with open_slide(path, "cpu") as slide:
        write_ndpis(path, [f"x-{dye}.ndpi" for dye in [*DYES][::-1]])
        with pytest.raises(SlideError, match="changed"):
            slide.plane(z=1)
