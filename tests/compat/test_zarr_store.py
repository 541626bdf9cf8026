"""zarr-python reads slides through `SlideStore`."""

import numpy as np
import pytest
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from napari_wsigpu import open_slide
from napari_wsigpu.compat.zarr_store import SlideStore
from tests.writers import slides


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(700, 900))
    with open_slide(path) as slide:
        yield slide


def test_a_slide_is_an_ome_zarr_image(slide):
    group = zarr.open_group(SlideStore(slide), mode="r")
    assert sorted(group) == ["0", "1", "2"]
    image = group.attrs["ome"]["multiscales"][0]
    assert [axis["name"] for axis in image["axes"]] == ["c", "y", "x"]
    for number, level in enumerate(slide.levels):
        array = group[image["datasets"][number]["path"]]
        np.testing.assert_array_equal(array[...], np.moveaxis(level[...], -1, 0))
        scale = image["datasets"][number]["coordinateTransformations"][0]["scale"]
        assert scale == pytest.approx(
            [1, *(s * slide.level_downsamples[number] for s in slide.mpp)]
        )


@pytest.mark.parametrize(
    "key", [np.s_[...], np.s_[100:650, 3:899], np.s_[::7, 5::3, 1], np.s_[699, 899]]
)
def test_a_level_is_an_array(slide, key):
    array = zarr.open_array(SlideStore(slide.levels[0]), mode="r")
    assert (array.shape, array.dtype) == (slide.levels[0].shape, np.uint8)
    np.testing.assert_array_equal(array[key], slide.levels[0][...][key])


def test_16_bits_and_one_channel(tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(300, 400, dtype="uint16"), (2,))
    with open_slide(path) as slide:
        level = slide.levels[1]
        array = zarr.open_array(SlideStore(level), mode="r")
        np.testing.assert_array_equal(array[...], level[...])
        alone = slide.level_array(0, 0)
        np.testing.assert_array_equal(zarr.open_array(SlideStore(alone), mode="r")[...], alone[...])


def test_store_is_read_only(slide):
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_array(SlideStore(slide.levels[0]), mode="r+")[0] = 1


def test_keys_and_byte_ranges(slide):
    store, prototype = SlideStore(slide), default_buffer_prototype()

    def get(key, part=None):
        found = sync(store.get(key, prototype, part))
        return None if found is None else found.to_bytes()

    async def listed(keys):
        return [key async for key in keys]

    keys = sync(listed(store.list()))
    assert len(keys) == len(set(keys))
    assert all(sync(store.exists(key)) for key in keys)
    assert set(sync(listed(store.list_dir("")))) == {"zarr.json", "0", "1", "2"}
    assert set(sync(listed(store.list_dir("1")))) == {"zarr.json", "c"}
    whole = get("1/c/0/0/1")
    assert len(whole) == np.prod(zarr.open_group(store, mode="r")["1"].chunks)
    assert get("1/c/0/0/1", RangeByteRequest(5, 9)) == whole[5:9]
    assert get("1/c/0/0/1", OffsetByteRequest(7)) == whole[7:]
    assert get("1/c/0/0/1", SuffixByteRequest(3)) == whole[-3:]
    for key in ("1/c/9/0/0", "1/c/0/0", "1/c/a/b/c", "9/zarr.json", "c", ""):
        assert get(key) is None
        assert not sync(store.exists(key))
