import gc
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tifffile

from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.compat.cucim import (
    CacheType,
    CuImage,
    CuImageIterator,
    DLDataType,
    DLDataTypeCode,
    preferred_memory_capacity,
)
from napari_wsigpu.model.errors import DeviceError, TargetWriteError
from napari_wsigpu.slide import runtime
from tests import oracles
from tests.conftest import decoding_threads
from tests.writers import philips, slides

WIDTH, HEIGHT = 473, 331
PLACES = [(x, y) for y in (0, 100, 250) for x in (0, 33, 200, 400)]
SIZE = (50, 40)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.tif"


@pytest.fixture
def levels(path):
    """Return the levels of a generic pyramid with downsamples 1, 3 and 6, written to `path`."""
    options = {"resolution": (2000.5, 1000.25), "resolutionunit": "CENTIMETER"}
    pixels = np.maximum(slides.picture(HEIGHT, WIDTH), 1)
    return slides.write_pyramid(path, pixels, (3, 2), photometric="rgb", software="w", **options)


@pytest.fixture
def image(path, levels):
    with CuImage(path) as image:
        yield image


@pytest.fixture
def aperio(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(HEIGHT, WIDTH), compression=1, encode=bytes)
    with CuImage(path) as image:
        yield image


def test_a_region_is_saved_as_by_cucim(image, tmp_path, levels):
    region = image.read_region((30, 20), (50, 40))
    region.save(tmp_path / "region")
    header, *numbers, pixels = (tmp_path / "region").read_bytes().split(b"\n", 4)
    assert (header, numbers) == (b"P6", [b"50", b"40", b"255"])
    expected = levels[0][20:60, 30:80]
    np.testing.assert_array_equal(np.frombuffer(pixels, np.uint8).reshape(40, 50, 3), expected)
    with pytest.raises(ValueError, match="Only regions"):
        image.save(tmp_path / "slide")
    with pytest.raises(TargetWriteError, match="can't be written"):
        region.save(tmp_path / "missing" / "region")


def cut(level, x, y, width, height):
    """Return a region in pixels of the level, with zeros outside."""
    rows, columns = np.arange(y, y + height), np.arange(x, x + width)
    inside = np.outer(
        (rows >= 0) & (rows < len(level)), (columns >= 0) & (columns < level.shape[1])
    )
    region = level.take(rows, 0, mode="clip").take(columns, 1, mode="clip")
    return region * inside[..., np.newaxis]


def test_attributes_of_a_slide(image, path, levels):
    assert image.path == str(path)
    assert repr(image) == f"<CuImage path:{path}>"
    assert image.is_loaded
    assert str(image.device) == "cpu"
    assert (image.ndim, image.dims, image.shape) == (3, "YXC", [HEIGHT, WIDTH, 3])
    assert image.size() == [HEIGHT, WIDTH, 3]
    assert image.size("XY") == image.size("xzy") == [WIDTH, HEIGHT]
    assert image.typestr == "|u1"
    assert image.dtype == DLDataType(DLDataTypeCode.DLUInt, 8, 1)
    assert image.channel_names == ["R", "G", "B"]
    assert image.spacing() == pytest.approx([10000 / 1000.25, 10000 / 2000.5, 1])
    assert image.spacing("xZ") == pytest.approx([10000 / 2000.5, 1])
    assert image.spacing_units() == ["micrometer", "micrometer", "color"]
    assert image.spacing_units("ZC") == ["", "color"]
    assert image.origin == [0, 0, 0]
    assert image.direction == np.eye(3).tolist()
    assert image.coord_sys == "LPS"
    assert image.associated_images == set()
    sizes = tuple((level.shape[1], level.shape[0]) for level in levels)
    assert image.resolutions == {
        "level_count": 3,
        "level_dimensions": sizes,
        "level_downsamples": pytest.approx((1, 3, 6), rel=0.01),
        "level_tile_sizes": ((64, 64),) * 3,
    }


def test_metadata(image, aperio, levels):
    tags = image.metadata["tiff"]
    assert tags == {
        "model": "",
        "software": "w",
        "resolution_unit": "centimeter",
        "x_resolution": pytest.approx(2000.5),
        "y_resolution": pytest.approx(1000.25),
    }
    own = image.metadata["cucim"]
    assert own["shape"] == [HEIGHT, WIDTH, 3]
    assert own["dtype"] == {"code": 1, "bits": 8, "lanes": 1}
    assert own["resolutions"]["level_dimensions"][0] == [WIDTH, HEIGHT]
    assert own["spacing_units"] == image.spacing_units()
    assert "_file" not in own
    assert set(aperio.metadata) == {"aperio", "cucim", "tiff"}
    assert aperio.metadata["aperio"]["MPP"] == "0.4990"
    with tifffile.TiffFile(aperio.path) as file:
        assert aperio.raw_metadata == file.pages.first.description
    assert set(image.read_region((0, 0), SIZE).metadata) == {"cucim"}


def test_raw_metadata_is_the_description(tmp_path):
    path = tmp_path / "slide.tiff"
    philips.write(path, slides.picture(60, 60), (1,))
    with CuImage(path) as image, tifffile.TiffFile(path) as file:
        assert image.raw_metadata == file.pages.first.description != ""
        assert image.read_region((0, 0), (9, 9)).raw_metadata == ""


def test_spacing_without_a_unit(path):
    options = {"resolution": (9, 4), "resolutionunit": "NONE"}
    slides.write_pyramid(path, slides.picture(99, 99), photometric="rgb", **options)
    with CuImage(path) as image:
        assert image.spacing() == [4, 9, 1]
        assert image.spacing_units() == ["", "", "color"]
        assert image.metadata["tiff"]["resolution_unit"] == ""


def test_sample_types_and_channels_are_kept(path):
    pixels = slides.picture(99, 120, 1, "uint16")[..., 0]
    tifffile.imwrite(path, pixels, tile=(64, 64))
    with CuImage(path) as image:
        assert image.shape == [99, 120, 1]
        assert image.dtype == DLDataType(1, 16, 1)
        assert image.channel_names == ["gray"]
        np.testing.assert_array_equal(image.read_region(), pixels[..., np.newaxis])


def test_8_bit_gray_becomes_rgba(path):
    pixels = slides.picture(99, 120, 1)
    tifffile.imwrite(path, pixels[..., 0], tile=(64, 64))
    opaque = np.dstack([pixels, pixels, pixels, np.full_like(pixels, 255)])
    with CuImage(path) as image:
        assert image.shape == [99, 120, 4]
        assert image.channel_names == [*"RGBA"]
        np.testing.assert_array_equal(image.read_region(), opaque)
        batches = image.read_region([(0, 0), (20, 9)], (50, 40), batch_size=2, num_workers=1)
        np.testing.assert_array_equal(np.asarray(next(batches))[1], opaque[9:49, 20:70])


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_whole_level_is_read_by_default(image, levels, level):
    region = image.read_region(level=level)
    np.testing.assert_array_equal(region, levels[level])
    np.testing.assert_array_equal(region, oracles.tifffile_page(image.path, level))


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    "place",
    [(0, 0), (37, 101), (-20, -13), (WIDTH - 20, -9), (-9, HEIGHT - 9), (470, 330), (5000, -5000)],
)
def test_pixels_outside_are_zero(image, levels, place, level):
    downsample = image.resolutions["level_downsamples"][level]
    x, y = (int(value / downsample) for value in place)
    region = image.read_region(place, SIZE, level)
    np.testing.assert_array_equal(region, cut(levels[level], x, y, *SIZE))


def test_locations_are_truncated(image, levels):
    downsample = image.resolutions["level_downsamples"][1]
    for x in range(-12, 30):
        region = image.read_region((x, 0), (9, 9), 1)
        np.testing.assert_array_equal(region, cut(levels[1], int(x / downsample), 0, 9, 9))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_pixels_outside_ignore_the_no_data_value(path, batch_size):
    pixels = slides.picture(99, 120)
    nodata = [(42113, "s", 0, "7", True)]
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="rgb", extratags=nodata)
    places = [(-9, -4), (100, 90), (-500, 0), (3, 500), (5, 6)]
    with open_slide(path) as slide:
        assert slide.layout.background == 7
    with CuImage(path) as image:
        found = image.read_region(places, (40, 30), num_workers=1, batch_size=batch_size)
        regions = [region for batch in found for region in np.asarray(batch).reshape(-1, 30, 40, 3)]
        for place, region in zip(places, regions, strict=True):
            np.testing.assert_array_equal(region, cut(pixels, *place, 40, 30))
            np.testing.assert_array_equal(image.read_region(place, (40, 30)), region)


def test_aperio_is_white_outside(aperio):
    region = np.asarray(aperio.read_region((-10, -10), (20, 20)))
    assert (region[:10] == 255).all()
    assert (region[:, :10] == 255).all()
    with open_slide(aperio.path) as slide:
        np.testing.assert_array_equal(region, slide.read_region((-10, -10), (20, 20)))
        inside = slide.read_region((41, 61), (80, 50), 2)
    np.testing.assert_array_equal(aperio.read_region((41, 61), (80, 50), 2), inside)


def test_philips_is_white_outside(image, levels):
    slide = image._file.slide
    slide.layout = replace(slide.layout, vendor="philips")
    region = np.asarray(image.read_region((-10, -7), (20, 20)))
    np.testing.assert_array_equal(region[7:, 10:], levels[0][:13, :10])
    assert (region[:7] == 255).all()
    assert (region[:, :10] == 255).all()


def test_attributes_of_a_region(image):
    region = image.read_region((-10, 5), (20, 30), level=1)
    assert isinstance(region, CuImage)
    assert region.shape == [30, 20, 3]
    assert region.size("XY") == [20, 30]
    assert region.path == image.path
    assert region.raw_metadata == ""
    assert region.resolutions == {
        "level_count": 1,
        "level_dimensions": ((20, 30),),
        "level_downsamples": (1.0,),
        "level_tile_sizes": ((20, 30),),
    }
    downsample = image.resolutions["level_downsamples"][1]
    assert region.spacing("XY") == pytest.approx([s / downsample for s in image.spacing("XY")])
    assert region.spacing_units() == image.spacing_units()


def test_a_region_is_an_array(image):
    region = image.read_region((3, 4), SIZE)
    interface = region.__array_interface__
    assert interface["shape"] == tuple(region.shape)
    assert interface["strides"] is None
    assert interface["data"][1] is False
    assert not hasattr(region, "__cuda_array_interface__")
    assert not hasattr(image, "__array_interface__")
    array = np.asarray(region)
    assert np.shares_memory(array, np.asarray(region))
    expected = array.copy()
    del region
    gc.collect()
    np.testing.assert_array_equal(array, expected)


def test_a_region_is_an_iterator_of_itself(image):
    region = image.read_region((3, 4), SIZE, num_workers=2)
    assert list(region) == [region]
    with pytest.raises(IndexError):
        list(image)


def test_regions_of_a_region(image, levels):
    region = image.read_region((10, 20), SIZE)
    np.testing.assert_array_equal(region.read_region(), region)
    part = region.read_region((4, 5), (6, 7))
    np.testing.assert_array_equal(part, levels[0][25:32, 14:20])
    assert part.resolutions["level_dimensions"] == ((6, 7),)
    for place, size in (((-1, 0), (6, 7)), ((45, 0), (6, 7)), ((0, 35), (6, 7))):
        with pytest.raises(ValueError, match="Invalid location"):
            region.read_region(place, size)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("level", [0, 2])
def test_many_locations(image, levels, workers, level):
    found = image.read_region(PLACES, SIZE, level, num_workers=workers)
    assert isinstance(found, CuImageIterator)
    assert iter(found) is found
    assert len(found) == len(PLACES)
    regions = list(found)
    assert len(regions) == len(PLACES)
    assert next(found, None) is None
    for place, region in zip(PLACES, regions, strict=True):
        assert region.dims == "YXC"
        np.testing.assert_array_equal(region, image.read_region(place, SIZE, level))


@pytest.mark.parametrize(
    "locations",
    [np.array(PLACES), [value for place in PLACES for value in place], iter(PLACES), (*PLACES,)],
    ids=["array", "flat", "iterator", "tuple"],
)
def test_kinds_of_locations(image, locations):
    found = [np.asarray(region) for region in image.read_region(locations, SIZE, num_workers=1)]
    expected = [np.asarray(image.read_region(place, SIZE)) for place in PLACES]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("prefetch_factor", [0, 2, 100])
def test_batches(image, prefetch_factor):
    batches = image.read_region(
        PLACES, SIZE, num_workers=2, batch_size=5, prefetch_factor=prefetch_factor
    )
    assert len(batches) == 3
    batches = list(batches)
    assert [batch.shape for batch in batches] == [[5, 40, 50, 3], [5, 40, 50, 3], [2, 40, 50, 3]]
    assert {batch.dims for batch in batches} == {"NYXC"}
    assert batches[0].spacing_units() == ["batch", "micrometer", "micrometer", "color"]
    assert batches[0].size("XY") == list(SIZE)
    found = np.concatenate([np.asarray(batch) for batch in batches])
    expected = [np.asarray(image.read_region(place, SIZE)) for place in PLACES]
    np.testing.assert_array_equal(found, expected)


def test_a_batch_of_one(image):
    (batch,) = image.read_region((5, 6), SIZE, batch_size=4)
    np.testing.assert_array_equal(batch, np.asarray(image.read_region((5, 6), SIZE))[np.newaxis])


@pytest.mark.parametrize(("batch_size", "lengths"), [(1, 12), (5, 2), (4, 3), (13, 0)])
def test_drop_last(image, batch_size, lengths):
    batches = image.read_region(
        PLACES, SIZE, num_workers=1, batch_size=batch_size, drop_last=True, shuffle=True, seed=3
    )
    assert len(batches) == lengths
    assert [batch.shape[:-3] for batch in batches] == [[batch_size][: batch_size > 1]] * lengths


def test_shuffling_depends_only_on_the_seed(image):
    def read(**options):
        found = image.read_region(PLACES, SIZE, num_workers=2, **options)
        return [np.asarray(region).tobytes() for region in found]

    plain, first, other = read(), read(shuffle=True, seed=1), read(shuffle=True, seed=2)
    assert first == read(shuffle=True, seed=1)
    assert first != plain
    assert first != other
    assert sorted(first) == sorted(other) == sorted(plain)
    assert len(set(plain)) == len(PLACES)
    with open_slide(image.path) as slide:
        regions = slide.read_regions(PLACES, SIZE, shuffle=True, seed=1)
        assert [region.tobytes() for region in regions] == first


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"level": -1}, ValueError, "'level' should be less than 3"),
        ({"level": 3}, ValueError, "'level' should be less than 3"),
        ({"size": (0, 5)}, ValueError, r"Invalid size \(0\) in the request! \(Should be > 0\)"),
        ({"size": (5, -1)}, ValueError, r"Invalid size \(-1\)"),
        ({"size": (WIDTH + 1, 5)}, ValueError, "exceeds the original image width 473"),
        ({"size": (5, HEIGHT + 1)}, ValueError, "exceeds the original image height 331"),
        ({"size": (5,)}, RuntimeError, r"size \(patch size\) should be 2!"),
        ({"location": (1, 2, 3)}, RuntimeError, "The number of locations should be"),
        ({"location": (1.5, 2)}, RuntimeError, "integers"),
        ({"location": PLACES}, RuntimeError, "Cannot read multiple locations with zero workers!"),
        ({"device": "tpu"}, DeviceError, "tpu"),
    ],
)
def test_invalid_regions_raise(image, arguments, kind, message):
    with pytest.raises(SlideError, match=message) as caught:
        image.read_region(**{"location": (0, 0), "size": SIZE} | arguments)
    assert isinstance(caught.value, kind)


def test_invalid_files_raise(tmp_path):
    with pytest.raises(ValueError, match=r"Cannot open .*none.tif! There is no file") as caught:
        CuImage(tmp_path / "none.tif")
    assert isinstance(caught.value, SlideError)
    with pytest.raises(ValueError, match=r"open http://host/x.tif! It is not a file"):
        CuImage("http://host/x.tif?secret")
    with pytest.raises(ValueError, match=r"Cannot open .* is a folder"):
        CuImage(str(tmp_path))
    (tmp_path / "text.tif").write_text("text")
    with pytest.raises(ValueError, match="is not a TIFF or DICOM slide"):
        CuImage(tmp_path / "text.tif")


def test_associated_images(aperio, image):
    assert aperio.associated_images == {"thumbnail", "label", "macro"}
    label = aperio.associated_image("label")
    with open_slide(aperio.path) as slide:
        np.testing.assert_array_equal(label, slide.associated_images["label"].read())
    assert label.dims == "YXC"
    assert label.spacing() == [1, 1, 1]
    assert label.spacing_units() == ["micrometer", "micrometer", "color"]
    assert label.associated_images == set()
    with pytest.raises(ValueError, match="no associated image 'barcode'"):
        aperio.associated_image("barcode")
    with pytest.raises(SlideError, match="no associated image"):
        image.associated_image("label")


@pytest.mark.usefixtures("leaves_nothing")
def test_closing_releases_everything(path, levels, handles_of):
    with CuImage(path) as image:
        region = image.read_region((0, 0), SIZE)
        with region:
            pass
        started = image.read_region(PLACES, SIZE, num_workers=2, batch_size=2)
        next(started)
        assert handles_of(path)
    assert not handles_of(path)
    started = None
    assert not decoding_threads()
    np.testing.assert_array_equal(region, levels[0][:40, :50])
    np.testing.assert_array_equal(region.read_region((1, 1), (9, 9)), levels[0][1:10, 1:10])
    assert image.shape == [HEIGHT, WIDTH, 3]
    image.close()
    with pytest.raises(RuntimeError, match="The image file is closed!"):
        image.read_region((0, 0), SIZE)


@pytest.mark.usefixtures("leaves_nothing")
def test_garbage_collected_image_is_closed(path, levels, handles_of):
    region = np.array(CuImage(path).read_region((0, 0), SIZE))
    gc.collect()
    assert not handles_of(path)
    np.testing.assert_array_equal(region, levels[0][:40, :50])


def test_associated_images_of_a_closed_slide(aperio):
    aperio.close()
    with pytest.raises(RuntimeError, match="The image file is closed!"):
        aperio.associated_image("label")


def test_cache_is_shared_with_the_process(image, monkeypatch):
    monkeypatch.setattr(runtime.default().tiles, "budget", runtime.default().tiles.budget)
    cache = CuImage.cache()
    assert cache.type == CacheType.NoCache  # cuCIM's default, whatever other slides have cached
    assert cache.memory_capacity == cache.memory_size == 0
    cache = CuImage.cache("per_process", memory_capacity=3)
    assert int(cache.type) == 1
    assert cache.memory_capacity == runtime.default().tiles.budget == 3 << 20
    assert cache.memory_size == cache.size == 0
    assert cache.config == {"type": "per_process", "memory_capacity": 3, "record_stat": False}
    for _ in range(2):  # tiles that are used again stay cached
        image.read_region()
    assert cache.memory_size == runtime.default().tiles.used > 0
    assert cache.free_memory == (3 << 20) - runtime.default().tiles.used
    cache.reserve(2)
    assert cache.memory_capacity == 3 << 20
    cache.reserve(5)
    assert cache.memory_capacity == CuImage.cache().memory_capacity == 5 << 20
    assert cache.capacity == 26
    assert cache.memory_size > 0
    assert CuImage.cache("nocache").type == CacheType.NoCache
    assert runtime.default().tiles.budget == 0
    with pytest.raises(ValueError, match=r"Slide\.stats"):
        CuImage.cache("per_process", record_stat=True)


def test_preferred_memory_capacity(image):
    assert preferred_memory_capacity(None, (1 << 20, 1 << 20)) == 1536
    assert preferred_memory_capacity(None, (1 << 20, 1 << 20), patch_size=(512, 512)) == 2304
    assert preferred_memory_capacity(image, patch_size=(64, 64)) == 1
    with pytest.raises(ValueError, match="image_size"):
        preferred_memory_capacity()


def test_data_types_can_be_pickled():
    kind = DLDataType(DLDataTypeCode.DLFloat, 32, 1)
    assert pickle.loads(pickle.dumps(kind)) == kind != DLDataType(2, 64, 1)


def test_cupy_is_not_imported():
    code = "import sys; import napari_wsigpu.compat.cucim; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_missing_device_raises(aperio, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="use device='cpu'"):
        aperio.associated_image("label", device)
    region = aperio.read_region((0, 0), SIZE)
    with pytest.raises(DeviceError, match="use device='cpu'"):
        region.read_region(device=device)


@pytest.fixture
def cupy():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("there is no CUDA device")
    return cupy


@pytest.mark.gpu
def test_regions_on_a_device(aperio, cupy):
    region = aperio.read_region((-10, 5), SIZE, device="cuda")
    interface = region.__cuda_array_interface__
    assert interface["shape"] == tuple(region.shape)
    assert interface["strides"] is None
    assert interface["mask"] is None
    assert interface["version"] == 3
    assert not hasattr(region, "__array_interface__")
    assert region.device == "cuda"
    expected = np.asarray(aperio.read_region((-10, 5), SIZE))
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(region)), expected)
    np.testing.assert_array_equal(region.read_region(), expected)
    np.testing.assert_array_equal(
        cupy.asarray(aperio.associated_image("label", "cuda")).get(),
        aperio.associated_image("label"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 4])
def test_batches_on_a_device(image, cupy, batch_size):
    options = {"batch_size": batch_size, "num_workers": 2}
    here = image.read_region(PLACES, SIZE, **options)
    there = image.read_region(PLACES, SIZE, **options, device="cuda")
    for expected, found in zip(here, there, strict=True):
        np.testing.assert_array_equal(cupy.asarray(found).get(), expected)
