"""Images whose pages lie in several files are those that tifffile reads, from any of these."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.errors import (
    SlideChangedError,
    SlideNotFoundError,
    TileError,
    UnsupportedSlideError,
)
from tests import micromanager
from tests.rangeserver import RangeServer

CHANNELS = np.random.default_rng(1).integers(0, 60000, (3, 70, 90), np.uint16)
WRITERS = {"mmstack": micromanager.write_stack, "ndtiff": micromanager.write_ndtiff}


@pytest.fixture(params=WRITERS)
def paths(request, tmp_path):
    paths = WRITERS[request.param](tmp_path, CHANNELS)
    with tifffile.TiffFile(paths[0]) as file:
        assert file.series[0].kind == request.param
        assert file.series[0].is_multifile
    return paths


def test_each_channel_comes_from_its_own_file(paths):
    for path in paths:
        with open_slide(path) as slide, tifffile.TiffFile(path) as file:
            np.testing.assert_array_equal(np.moveaxis(slide.levels[0][...], 2, 0), CHANNELS)
            np.testing.assert_array_equal(file.asarray(), CHANNELS)
            assert {item.path for item in slide.layout.files} == set(map(str, paths))
            assert slide.layout.problems == ()


def test_a_sibling_that_changes_or_goes_is_noticed(paths):
    with open_slide(paths[0]) as slide:
        paths[1].write_bytes(paths[1].read_bytes() + b"more")
        with pytest.raises(SlideChangedError, match=paths[1].name):
            slide.levels[0][...]
        paths[1].unlink()
        slide.release()
        with pytest.raises(SlideNotFoundError, match=paths[1].name):
            slide.levels[0][...]


@pytest.mark.parametrize("lost", [6000, CHANNELS[0].nbytes + 1])
@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_is_cut_off_is_not_read_on_in_the_next_one(tmp_path, number, lost):
    paths = micromanager.write_ndtiff(tmp_path, CHANNELS)
    paths[number].write_bytes(paths[number].read_bytes()[:-lost])
    with open_slide(paths[0]) as slide:
        with pytest.raises(TileError, match="row 0, column 0"):
            slide.levels[0][...]
        assert not slide.level_array(0, tolerant=True)[...].any()


def test_siblings_that_are_stored_in_another_way_are_refused(tmp_path):
    first, second, _ = micromanager.write_stack(tmp_path, CHANNELS)
    other = tmp_path / "other"
    other.mkdir()
    micromanager.write_stack(other, CHANNELS[:, :35])
    (other / second.name).replace(second)
    with pytest.raises(UnsupportedSlideError, match="stored in different ways"):
        open_slide(first)


def test_files_of_other_folders_are_not_read(tmp_path):
    (tmp_path / "here").mkdir()
    first, _ = micromanager.write_ndtiff(tmp_path / "here", CHANNELS, ("a.tif", "../b.tif"))
    with pytest.raises(UnsupportedSlideError, match="other folders"):
        open_slide(first)


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_alone_shows_its_own_planes_and_says_so(tmp_path, remote):
    paths = micromanager.write_stack(tmp_path, CHANNELS)
    if not remote:
        for path in paths[:1] + paths[2:]:
            path.unlink()
    with RangeServer(tmp_path) as server:
        path = server.url(paths[1].name) if remote else paths[1]
        with open_slide(path) as slide:
            np.testing.assert_array_equal(slide.levels[0][..., 0], CHANNELS[1])
            [problem] = slide.layout.problems
            assert problem.startswith("The stack has 3 planes, but its files here hold 1;")
