"""Comparison with tiffslide: results and errors for the same files."""

import io
import pickle

import fsspec
import numpy as np
import pytest
import tifffile
import tiffslide as theirs
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from napari_wsigpu import SlideError
from napari_wsigpu.compat import tiffslide as ours
from tests.conftest import shared_slide
from tests.writers import icc, slides

SHARED = [
    "CMU-1-Small-Region.svs",
    "openslide-boxes.tiff",
    "rasterio-cogeo.tif",
    "ndpi-test3-DAPI-387.ndpi",
    "found/small_vectra.qptiff",
    "found/hubmap-test_image.ome.tiff",
]


def write_sparse(path):
    slides.write_aperio(path, slides.picture(500, 700), (), missing=[(0, 5, 6, 7)])


def write_deep(path):
    pixels = slides.picture(300, 400, 1, "uint16")[..., 0]
    with tifffile.TiffWriter(path) as file:
        for step in (1, 3):
            file.write(pixels[::step, ::step], tile=(64, 64), subfiletype=step > 1)


WRITTEN = {"sparse.svs": write_sparse, "deep.tif": write_deep}
# Properties with other names or values: the sizes of parts that strips and JPEGs are read in.
UNLIKE = ("tile-width", "tile-height", "hamamatsu.Model")


@pytest.fixture(params=[*SHARED, *WRITTEN])
def path(request, tmp_path):
    if request.param in SHARED:
        return shared_slide(request.param)
    WRITTEN[request.param](tmp_path / request.param)
    return tmp_path / request.param


@pytest.fixture
def both(path):
    with theirs.TiffSlide(path) as expected, ours.TiffSlide(path) as slide:
        yield expected, slide


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(300, 450))
    with ours.TiffSlide(path) as slide:
        yield slide


pytestmark = pytest.mark.filterwarnings("ignore:hamamatsu-format")


def assert_same(image, expected):
    assert image.mode == expected.mode
    assert image.info.get("icc_profile") == expected.info.get("icc_profile")
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_pixels(both):
    expected, slide = both
    count = expected.level_count  # this package may have additional, computed levels
    assert slide.level_dimensions[:count] == expected.level_dimensions
    assert slide.level_downsamples[:count] == pytest.approx(expected.level_downsamples)
    for level in range(count):
        width, height = expected.level_dimensions[level]
        step = expected.level_downsamples[level]
        for x, y in ((0, 0), (-20, -9), (width // 3, height // 2), (width - 25, height - 30)):
            wanted = (int(x * step), int(y * step)), level, (60, 50)
            for padding in (True, False):
                options = {"as_array": True, "padding": padding}
                array = slide.read_region(*wanted, **options)
                np.testing.assert_array_equal(array, expected.read_region(*wanted, **options))
        if array.shape[2] in (1, 3):
            assert_same(slide.read_region(*wanted), expected.read_region(*wanted))


def test_properties(both):
    expected, slide = both
    for name, value in expected.properties.items():
        # This package knows more about some files.
        if value is not None and not name.endswith(UNLIKE) and not name.startswith("tiff.Image"):
            found = slide.properties[name]
            assert found == (pytest.approx(value) if isinstance(value, float) else value), name
    assert slide.properties["tiffslide.series-axes"] in ("YXS", "CYX", "YX")


def test_arrays_of_zarr(path, both):
    expected, slide = both
    if path.name == "sparse.svs":
        pytest.skip("missing tiles have the background's colour there")
    for level in range(expected.level_count):
        array, other = slide.ts_zarr_grp[str(level)], expected.ts_zarr_grp[str(level)]
        assert (array.shape, array.dtype) == (other.shape, other.dtype)
        part = tuple(slice(0, min(length, 70)) for length in other.shape)
        np.testing.assert_array_equal(array[part], other[part])


def test_thumbnails_and_levels(both):
    expected, slide = both
    for size in ((40, 50), (100, 20)):
        factor = max(n / m for n, m in zip(expected.dimensions, size, strict=True))
        level = expected.get_best_level_for_downsample(factor)
        if level == slide.get_best_level_for_downsample(factor):
            assert_same(slide.get_thumbnail(size), expected.get_thumbnail(size))
    assert (slide.color_profile is None) == (expected.color_profile is None)


def test_associated_images(tmp_path):
    path = shared_slide("CMU-1-Small-Region.svs")
    with theirs.TiffSlide(path) as expected, ours.TiffSlide(path) as slide:
        assert set(slide.associated_images) == set(expected.associated_images)
        for name, image in expected.associated_images.items():
            assert_same(slide.associated_images[name], image)
        wanted = (100, 100)
        thumbnail = slide.get_thumbnail(wanted, use_embedded=True)
        assert_same(thumbnail, expected.get_thumbnail(wanted, use_embedded=True))
        assert slide.ts_tifffile.pages.first.shape == expected.ts_tifffile.pages.first.shape
    with pytest.raises(ValueError, match="was closed"):
        slide.read_region((0, 0), 0, (5, 5))


def test_pickles(path):
    with ours.TiffSlide(path) as slide:
        # All that is computed once, and may not be picklable itself.
        assert slide.properties
        slide.associated_images, slide.zarr_group, slide.ts_tifffile  # noqa: B018
        again = pickle.loads(pickle.dumps(slide))
        assert again.dimensions == slide.dimensions
        assert_same(again.read_region((0, 0), 0, (9, 9)), slide.read_region((0, 0), 0, (9, 9)))
    again.close()
    with pytest.raises(ValueError, match="was closed"):
        again.read_region((0, 0), 0, (5, 5))


def test_profiles(tmp_path):
    path = tmp_path / "slide.svs"
    tifffile.imwrite(path, slides.picture(300, 450), tile=(64, 64), iccprofile=icc.ADOBE)
    with theirs.TiffSlide(path) as expected, ours.TiffSlide(path) as slide:
        assert slide.color_profile.tobytes() == expected.color_profile.tobytes()
        assert_same(slide.read_region((9, 9), 0, (9, 9)), expected.read_region((9, 9), 0, (9, 9)))
        assert slide.get_thumbnail((9, 9)).info["icc_profile"] == icc.ADOBE


@pytest.fixture
def url(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(300, 450))
    files = MemoryFileSystem()
    files.pipe("/in memory.svs", path.read_bytes())
    yield "memory://in memory.svs"
    files.rm("/in memory.svs")


@pytest.mark.parametrize("kind", ["URL", "file", "stream", "bytes", "local", "local file"])
def test_kinds_of_inputs(url, tmp_path, kind, recwarn):
    path = tmp_path / "slide.svs"
    with fsspec.open(url) as stream, path.open("rb") as local:
        file = {
            "URL": url,
            "file": fsspec.open(url),
            "stream": stream,
            "bytes": io.BytesIO(path.read_bytes()),
            "local": fsspec.open(f"file://{path}"),
            "local file": local,
        }[kind]
        with ours.open_slide(file) as slide, ours.open_slide(path) as expected:
            for level in range(expected.level_count):
                wanted = (90, 80), level, (50, 40)
                assert_same(slide.read_region(*wanted), expected.read_region(*wanted))
            assert slide.properties == expected.properties
            assert slide.ts_tifffile.pages.first.shape == (300, 450, 3)
            named = "a stream" if kind == "bytes" else ".svs"
            assert named in repr(slide)
        assert not stream.closed
        assert not local.closed
        assert ours.TiffSlide.detect_format(url, storage_options={}) == "aperio"
    assert not recwarn.list


def test_closed_stream_raises(url, tmp_path):
    stream = io.BytesIO((tmp_path / "slide.svs").read_bytes())
    with ours.TiffSlide(stream) as slide:
        stream.close()
        with pytest.raises(OSError, match="a stream"):
            slide.read_region((0, 0), 0, (5, 5))


def test_error_in_a_stream_names_the_tile(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150), encode=lambda tile: b"damaged")
    slide = ours.TiffSlide(io.BytesIO(path.read_bytes()))
    with slide, pytest.raises(SlideError, match="of 'a stream' could not be decoded"):
        slide.read_region((0, 0), 0, (5, 5))


def test_invalid_inputs_raise(tmp_path, url):
    text = tmp_path / "text.svs"
    text.write_text("no slide")
    for wrong in (text, io.BytesIO(b"no slide"), io.BytesIO()):
        with pytest.raises(tifffile.TiffFileError) as caught:
            ours.open_slide(wrong)
        assert isinstance(caught.value, SlideError)
        assert ours.TiffSlide.detect_format(wrong) is None
    for missing in (tmp_path / "none.svs", "memory://none.svs"):
        with pytest.raises(FileNotFoundError, match=r"none\.svs"):
            ours.TiffSlide(missing)
    for wrong in ({}, "unheard-of://slide.svs"):
        with pytest.raises(ValueError, match=r"not a path|unheard-of"):
            ours.TiffSlide(wrong)
    with pytest.warns(UserWarning, match="storage_options are ignored"):
        ours.TiffSlide(fsspec.open(url), storage_options={"anon": True}).close()


def test_missing_levels(slide):
    for level in (-1, slide.level_count):
        with pytest.raises(IndexError, match=f"no level {level}; it has 3 levels, 0 to 2"):
            slide.read_region((0, 0), level, (5, 5), padding=False)
        with pytest.warns(UserWarning, match="out-of-bounds"):
            array = slide.read_region((0, 0), level, (5, 4), as_array=True)
        np.testing.assert_array_equal(array, np.zeros((4, 5, 3)))
    with pytest.warns(UserWarning, match="out-of-bounds"):
        assert not slide.read_region((450, 0), 0, (5, 4), as_array=True).any()
    assert slide.read_region((-9, 0), 0, (5, 4), as_array=True, padding=False).shape == (4, 0, 3)


def test_flat_images(tmp_path):
    path = tmp_path / "picture.png"
    pixels = slides.picture(60, 80)
    Image.fromarray(pixels).save(path)
    with ours.open_slide(path) as slide:
        assert isinstance(slide, ours.NotTiffSlide)
        np.testing.assert_array_equal(slide.read_region((0, 0), 0, (80, 60), as_array=True), pixels)
        assert slide.associated_images == {}
        assert slide.get_thumbnail((40, 40)).size == (40, 30)
    assert ours.NotTiffSlide.detect_format(path) == "PNG"
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        ours.NotTiffSlide(tmp_path / "none.png")


def test_unsupported_channels_raise(tmp_path):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(90, 100, 5).transpose(2, 0, 1)
    tifffile.imwrite(path, pixels, tile=(32, 32), planarconfig="separate", photometric="minisblack")
    with ours.TiffSlide(path) as slide:
        array = slide.read_region((0, 0), 0, (100, 90), as_array=True)
        np.testing.assert_array_equal(array.transpose(2, 0, 1), pixels)
        with pytest.raises(ValueError, match="5 channels of uint8; use as_array"):
            slide.get_thumbnail((50, 50))


@pytest.mark.parametrize("name", ours.ALIASES)
def test_openslide_aliases(name):
    with pytest.warns(UserWarning, match=f"'{name}' is an alias"):
        assert issubclass(getattr(ours, name), ours.TiffSlide | ours.TiffFileError)
    with (
        pytest.warns(UserWarning, match="provide 'AbstractSlide'"),
        pytest.raises(AttributeError),
    ):
        ours.AbstractSlide  # noqa: B018
