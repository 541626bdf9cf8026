"""Images whose pages lie in several files are those that tifffile reads, from any of these."""

import os
import re
import struct
import time
import tracemalloc

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideChangedError,
    SlideError,
    SlideNotFoundError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from tests.fakes.rangeserver import RangeServer
from tests.writers import micromanager, stacks

CHANNELS = np.random.default_rng(1).integers(0, 60000, (3, 70, 90), np.uint16)
WRITERS = {
    "mmstack": micromanager.write_stack,
    "ndtiff": micromanager.write_ndtiff,
    "ome": lambda folder, channels: stacks.write_ome_files(folder, channels[None, None]),
}


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


def test_linked_file_is_read_with_the_files_next_to_its_target(paths, tmp_path):
    link = tmp_path / "links" / paths[1].name
    link.parent.mkdir()
    link.symlink_to(paths[1])
    with open_slide(link) as slide, tifffile.TiffFile(link) as file:
        assert slide.path == str(link)
        assert slide.layout.problems == ()
        np.testing.assert_array_equal(np.moveaxis(slide.levels[0][...], 2, 0), file.asarray())
        np.testing.assert_array_equal(file.asarray(), CHANNELS)


def test_changed_or_missing_sibling_is_noticed(paths):
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
def test_truncated_file_does_not_continue_in_the_next(tmp_path, number, lost):
    paths = micromanager.write_ndtiff(tmp_path, CHANNELS)
    paths[number].write_bytes(paths[number].read_bytes()[:-lost])
    with open_slide(paths[0]) as slide:
        with pytest.raises(TileError, match="row 0, column 0"):
            slide.levels[0][...]
        assert not slide.level_array(0, tolerant=True)[...].any()


def test_siblings_of_another_encoding_are_refused(tmp_path):
    first, second, _ = micromanager.write_stack(tmp_path, CHANNELS)
    other = tmp_path / "other"
    other.mkdir()
    micromanager.write_stack(other, CHANNELS[:, :35])
    (other / second.name).replace(second)
    with pytest.raises(UnsupportedSlideError, match="store images in different ways"):
        open_slide(first)


def test_files_of_other_folders_are_not_read(tmp_path):
    (tmp_path / "here").mkdir()
    first, _ = micromanager.write_ndtiff(tmp_path / "here", CHANNELS, ("a.tif", "../b.tif"))
    with pytest.raises(UnsupportedSlideError, match="other folders"):
        open_slide(first)


@pytest.mark.parametrize("name", ["../b.tif", "/dev/null"])
def test_index_entries_in_other_folders_are_not_opened(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    first, *_ = micromanager.write_ndtiff(tmp_path / "here", CHANNELS, ("a.tif", "b.tif"))
    index = tmp_path / "here" / "NDTiff.index"
    stored = struct.pack("<I", 5) + b"b.tif"
    index.write_bytes(
        index.read_bytes().replace(stored, struct.pack("<I", len(name)) + name.encode())
    )
    monkeypatch.setattr(tifffile.TiffFile, "series", property(lambda file: pytest.fail("opened")))
    with pytest.raises(UnsupportedSlideError, match="other folders"):
        open_slide(first)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (micromanager.write_stack, "img_MMStack_1.ome.tif"),
        (micromanager.write_ndtiff, "b.tif"),
        (micromanager.write_ndtiff, "NDTiff.index"),
    ],
)
def test_a_pipe_is_no_file_of_a_stack(tmp_path, write, name):
    first, *_ = write(tmp_path, CHANNELS)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    holder = os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK)  # so that none waits to open it
    try:
        with pytest.raises(CorruptSlideError, match="one of which is not a regular file"):
            open_slide(first)
    finally:
        os.close(holder)


def test_stack_of_too_many_planes_is_refused_before_listing(tmp_path, monkeypatch):
    first, *_ = micromanager.write_stack(tmp_path, CHANNELS, {"Frames": 10**8})
    monkeypatch.setattr(tifffile.TiffFile, "series", property(lambda file: pytest.fail("listed")))
    with pytest.raises(UnsupportedSlideError, match="claims 300000000 planes"):
        open_slide(first)


@pytest.mark.parametrize("number", ["100000002", '"100000002"', "-100000000"])
def test_index_of_too_many_planes_is_refused_before_listing(tmp_path, monkeypatch, number):
    first, *_ = micromanager.write_ndtiff(tmp_path, CHANNELS)
    index = tmp_path / "NDTiff.index"
    old, new = b'{"channel": 2}', b'{"channel": %b}' % number.encode()
    index.write_bytes(
        index.read_bytes().replace(
            struct.pack("<I", len(old)) + old, struct.pack("<I", len(new)) + new
        )
    )
    monkeypatch.setattr(tifffile.TiffFile, "series", property(lambda file: pytest.fail("listed")))
    with pytest.raises(UnsupportedSlideError, match=r"claims 10000000\d planes"):
        open_slide(first)


@pytest.mark.parametrize("text", [b'{"channel": 2}', b"a.tif"])
def test_an_index_with_a_text_longer_than_itself_takes_no_memory(tmp_path, text):
    first, *_ = micromanager.write_ndtiff(tmp_path, CHANNELS)
    index = tmp_path / "NDTiff.index"
    data = bytearray(index.read_bytes())
    place = data.rindex(text) - 4
    data[place : place + 4] = struct.pack("<I", 1 << 30)
    index.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptSlideError, match=r"The index of planes '.*' is damaged"):
            open_slide(first)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_plane_listed_twice_is_reported(tmp_path):
    first, *_ = micromanager.write_ndtiff(tmp_path, CHANNELS)
    index = tmp_path / "NDTiff.index"
    index.write_bytes(index.read_bytes().replace(b'{"channel": 2}', b'{"channel": 1}'))
    with open_slide(first) as slide:
        assert slide.layout.problems == (
            "The index lists 1 duplicate image(s); the last one of a plane is shown.",
        )
        np.testing.assert_array_equal(slide.levels[0][..., 1], CHANNELS[2])


@pytest.mark.parametrize("remote", [False, True])
def test_single_file_of_a_stack_shows_its_planes(tmp_path, remote):
    paths = micromanager.write_stack(tmp_path, CHANNELS)
    if not remote:
        for path in paths[:1] + paths[2:]:
            path.unlink()
    with RangeServer(tmp_path) as server:
        path = server.url(paths[1].name) if remote else paths[1]
        with open_slide(path) as slide:
            np.testing.assert_array_equal(slide.levels[0][..., 0], CHANNELS[1])
            [problem] = slide.layout.problems
            assert problem.startswith(
                "The stack has 3 planes, but the files in this folder hold 1;"
            )


@pytest.mark.parametrize("remote", [False, True])
def test_ndtiff_file_without_its_index(tmp_path, remote):
    first, _ = micromanager.write_ndtiff(tmp_path, CHANNELS)
    if not remote:
        (tmp_path / "NDTiff.index").unlink()
    with RangeServer(tmp_path) as server, open_slide(server.url("a.tif") if remote else first) as s:
        np.testing.assert_array_equal(s.levels[0][..., 0], CHANNELS[0])
        [problem] = s.layout.problems
        assert problem.startswith("The file is part of an NDTiff stack, whose index")


def test_truncated_ome_file_is_named(tmp_path):
    whole, *_, cut = stacks.write_ome_files(tmp_path, stacks.stack())
    os.truncate(cut, cut.stat().st_size // 2)
    with open_slide(whole) as slide:  # the planes of its own
        first, _ = slide.layout.problems
        assert first.startswith("The OME-XML refers to planes in 3 other file(s)")
    with pytest.raises(CorruptSlideError, match=f"{cut.name}' is truncated: its list of images"):
        open_slide(cut)


@pytest.mark.parametrize("several", [False, True])
def test_ome_with_missing_planes(tmp_path, several):
    path = tmp_path / "a.ome.tif"
    paths = [path]
    if several:
        paths = stacks.write_ome_files(tmp_path, stacks.stack())
    else:
        stacks.write_ome(path, stacks.stack())
    for each in paths:
        each.write_bytes(each.read_bytes().replace(b'SizeT="2"', b'SizeT="7"'))
    with open_slide(paths[0]) as slide:
        [problem] = slide.layout.problems
        assert problem == (
            "The OME-XML declares 70 planes, but gives a valid page for only 20 of them; export "
            "the image again."
        )
        with pytest.raises(SlideError, match="missing"):
            slide.read_region((0, 0), 0, (8, 8), t=6)


@pytest.mark.parametrize("place", ['FirstC="7" IFD="2"', 'FirstC="0" IFD="2"', 'IFD="9"'])
def test_ome_with_a_wrong_plane_position(tmp_path, place):
    path = tmp_path / "a.ome.tif"
    pixels = np.arange(3 * 40 * 50, dtype=np.uint16).reshape(3, 40, 50)
    tifffile.imwrite(path, pixels, metadata={"axes": "CYX", "Channel": {"Name": list("abc")}})
    places = 'FirstC="0" IFD="0"', 'FirstC="1" IFD="1"', place
    data = "".join(f'<TiffData {each} PlaneCount="1"/>' for each in places)
    xml = re.sub("<TiffData.*</Pixels>", f"{data}</Pixels>", tifffile.tiffcomment(path))
    tifffile.tiffcomment(path, xml)
    with open_slide(path) as slide:
        assert slide.layout.problems == (
            "The OME-XML declares 3 planes, but gives a valid page for only 2 of them; export the "
            "image again.",
            "1 of 3 channels are missing from the file.",
        )
        np.testing.assert_array_equal(slide.levels[0][..., 1], pixels[1])


def test_ome_without_plane_positions(tmp_path):
    path = tmp_path / "a.ome.tif"
    stacks.write_ome(path, stacks.stack())
    data = path.read_bytes()
    place = b'<TiffData IFD="0" PlaneCount="20"/>'
    assert place in data
    path.write_bytes(data.replace(place, bytes(len(place)).replace(b"\0", b" ")))
    with open_slide(path) as slide:
        assert slide.layout.problems == (
            "The OME-XML declares 20 planes without their positions in the file; 19 of them can't "
            "be selected.",
        )


def test_planes_of_ome_in_several_files(tmp_path):
    pixels = stacks.stack()
    for path in stacks.write_ome_files(tmp_path, pixels):
        with open_slide(path) as slide:
            assert (slide.planes.size_t, slide.planes.size_z) == (2, 5)
            assert [channel.name for channel in slide.channels] == ["stain 0", "stain 1"]
            assert slide.mpp == (0.5, 0.5)
            assert slide.layout.problems == ()
            for t, z in ((0, 2), (1, 2), (1, 4)):
                plane = np.moveaxis(pixels[t, z], 0, -1)
                np.testing.assert_array_equal(slide.plane(z, t).levels[0][...], plane)
                np.testing.assert_array_equal(slide.plane(z, t).levels[1][...], plane[::2, ::2])


COMPANION = "set.companion.ome"


@pytest.fixture(scope="module")
def companions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    return folder, stacks.write_ome_files(folder, stacks.stack(), COMPANION)


def test_companion_describes_each_of_its_files(companions):
    folder, paths = companions
    xml = (folder / COMPANION).read_text("utf-8")
    with tifffile.TiffFile(paths[0], omexml=xml) as file:
        [series] = file.series
        expected = series.asarray()
        assert (series.axes, series.shape) == ("TCZYX", expected.shape)
    for path in (*paths, folder / COMPANION):
        with open_slide(path) as slide:
            assert slide.layout.problems == ()
            assert slide.path == str(path)
            assert (slide.planes.size_t, slide.planes.size_z) == (2, 5)
            assert [channel.name for channel in slide.channels] == ["stain 0", "stain 1"]
            assert slide.mpp == (0.5, 0.5)
            assert {item.path for item in slide.layout.files} == set(map(str, paths))
            for t, z in ((0, 2), (1, 0), (1, 4)):
                plane = np.moveaxis(expected[t, :, z], 0, -1)
                np.testing.assert_array_equal(slide.plane(z, t).levels[0][...], plane)
                np.testing.assert_array_equal(slide.plane(z, t).levels[1][...], plane[::2, ::2])


def test_a_companion_may_be_an_ome_tiff(tmp_path):
    paths = stacks.write_ome_files(tmp_path, CHANNELS[None, None], COMPANION)
    xml = (tmp_path / COMPANION).read_text("utf-8")
    master = np.zeros((8, 8), np.uint8)
    tifffile.imwrite(tmp_path / "m.tif", master, description=xml, metadata=None)
    (tmp_path / "m.tif").replace(tmp_path / COMPANION)
    with open_slide(paths[1]) as slide:
        assert [channel.name for channel in slide.channels] == ["stain 0", "stain 1", "stain 2"]
        np.testing.assert_array_equal(np.moveaxis(slide.levels[0][...], 2, 0), CHANNELS)


def gone(companion):
    companion.unlink()


def broken(companion):
    companion.write_text("<OME><Image")


def of_entities(companion):
    companion.write_text('<!DOCTYPE x [<!ENTITY a "aa">]><OME>&a;</OME>')


def of_others(companion):
    text = companion.read_text().replace("t0c0.ome.tif", "other.ome.tif")
    companion.write_text(text.replace("000000000000<", "000000000009<"))


def binary_only(companion):
    text = companion.read_text()
    companion.write_text(
        text.replace("<Image", f'<BinaryOnly MetadataFile="{companion.name}"/><Image')
    )


def of_no_file(companion):
    text = companion.read_text()
    companion.write_text(text.replace("</Pixels>", '<TiffData IFD="0"/></Pixels>'))


def pipe(companion):
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    companion.unlink()
    os.mkfifo(companion)


@pytest.mark.parametrize(
    "change", [gone, broken, of_entities, of_others, binary_only, of_no_file, "long", pipe]
)
def test_unusable_companion_is_reported(tmp_path, monkeypatch, change):
    paths = stacks.write_ome_files(tmp_path, CHANNELS[None, None], COMPANION)
    if change == "long":
        monkeypatch.setattr(limits, "header_bytes", 16 * 400)
    else:
        change(tmp_path / COMPANION)
    with open_slide(paths[0]) as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 0], CHANNELS[0])
        [problem] = slide.layout.problems
        assert problem.startswith("The OME-XML is in another file, which is missing from this")
        assert COMPANION not in problem


def test_companion_is_read_from_the_same_folder_only(tmp_path):
    [path, *_] = stacks.write_ome_files(tmp_path, CHANNELS[None, None], COMPANION)
    for name in (str(tmp_path / COMPANION), f"../{tmp_path.name}/{COMPANION}"):
        xml = f'<OME xmlns="{stacks.OME}"><BinaryOnly MetadataFile="{name}"/></OME>'
        tifffile.imwrite(path, CHANNELS[0], description=xml, metadata=None)
        with open_slide(path) as slide:
            [problem] = slide.layout.problems
            assert problem.startswith("The OME-XML is in another file")


def nested(companion):
    text = companion.read_text()
    companion.write_text(text.replace("</OME>", f"{'<a>' * 3000}{'</a>' * 3000}</OME>"))


@pytest.mark.parametrize(
    "change", [broken, of_entities, binary_only, of_no_file, nested, "long", "alone"]
)
def test_companion_without_its_files_is_refused(tmp_path, monkeypatch, change):
    paths = stacks.write_ome_files(tmp_path, CHANNELS[None, None], COMPANION)
    if change == "long":
        monkeypatch.setattr(limits, "header_bytes", 16 * 400)
    elif change == "alone":
        for path in paths:
            path.unlink()
    else:
        change(tmp_path / COMPANION)
    with pytest.raises(SlideError, match=COMPANION):
        open_slide(tmp_path / COMPANION)


def test_companion_with_thousands_of_references_is_refused_early(tmp_path):
    [path, *_] = stacks.write_ome_files(tmp_path, CHANNELS[None, None], COMPANION)
    plane = f'<TiffData><UUID FileName="{path.name}">urn:uuid:1</UUID></TiffData>'
    pixels = f'<Pixels SizeX="9" SizeY="9">{plane * 4000}</Pixels>'
    xml = f'<OME xmlns="{stacks.OME}"><BinaryOnly/><Image>{pixels}</Image></OME>'
    (tmp_path / COMPANION).write_text(xml)
    begin = time.process_time()
    with pytest.raises(SlideError, match="none of which are in its folder"):
        open_slide(tmp_path / COMPANION)
    assert time.process_time() - begin < 2


def test_each_file_of_several_ome_images_shows_its_own(tmp_path):
    names = ["one.ome.tif", "two.ome.tif"]
    uuids = [f"urn:uuid:00000000-0000-0000-0000-00000000000{number}" for number in (1, 2)]
    images = "".join(
        f'<Image ID="Image:{number}" Name="position {number}"><Pixels ID="Pixels:{number}" '
        'DimensionOrder="XYZCT" Type="uint16" SizeX="90" SizeY="70" SizeZ="1" SizeC="1" SizeT="1" '
        f'PhysicalSizeX="{number + 1}" PhysicalSizeY="{number + 1}">'
        f'<Channel/><TiffData IFD="0" PlaneCount="1"><UUID FileName="{name}">{uuid}</UUID>'
        "</TiffData></Pixels></Image>"
        for number, (name, uuid) in enumerate(zip(names, uuids, strict=True))
    )
    for number, (name, uuid) in enumerate(zip(names, uuids, strict=True)):
        xml = f'<OME xmlns="{stacks.OME}" UUID="{uuid}">{images}</OME>'
        pixels = CHANNELS[number]
        tifffile.imwrite(tmp_path / name, pixels, description=xml, metadata=None)
    for number, name in enumerate(names):
        with open_slide(tmp_path / name) as slide:
            np.testing.assert_array_equal(slide.levels[0][..., 0], CHANNELS[number])
            assert slide.mpp == (number + 1, number + 1)


@pytest.mark.parametrize("uuid", ["", 'UUID="urn:uuid:1"'])
def test_renamed_ome_file_describes_itself(tmp_path, uuid):
    planes = "".join(
        f'<TiffData FirstC="{c}" IFD="{2 - c}" PlaneCount="1">'
        '<UUID FileName="old.ome.tif">urn:uuid:1</UUID></TiffData>'
        for c in range(3)
    )
    xml = (
        f'<OME xmlns="{stacks.OME}" {uuid}><Image ID="Image:0"><Pixels ID="Pixels:0" '
        'DimensionOrder="XYZCT" Type="uint16" SizeX="90" SizeY="70" SizeZ="1" SizeC="3" SizeT="1">'
        f'<Channel Name="a"/><Channel Name="b"/><Channel Name="c"/>{planes}</Pixels></Image></OME>'
    )
    path = tmp_path / "old.ome.tif"
    tifffile.imwrite(path, CHANNELS[::-1], description=xml, metadata=None, photometric="minisblack")
    expected = tifffile.imread(path)
    np.testing.assert_array_equal(expected, CHANNELS)
    renamed = path.rename(tmp_path / "new.ome.tif")
    with open_slide(renamed) as slide:
        assert ["as that file, renamed" in text for text in slide.layout.problems] == (
            [] if uuid else [True]
        )
        assert [channel.name for channel in slide.channels] == ["a", "b", "c"]
        np.testing.assert_array_equal(np.moveaxis(slide.levels[0][...], 2, 0), expected)


def away(paths):
    paths[1].unlink()


def damaged(paths):
    paths[1].write_bytes(b"II*\0" + bytes(100))


def elsewhere(paths):
    (paths[0].parent / "b").mkdir()
    paths[1].rename(paths[0].parent / "b" / "t0c1.ome.tif")
    content = paths[0].read_bytes()
    paths[0].write_bytes(content.replace(b'"t0c1.ome.tif"', b'"b/t0c1.ome.t"'))


@pytest.mark.parametrize("change", [away, damaged, elsewhere])
def test_missing_ome_files_are_reported(tmp_path, change):
    paths = stacks.write_ome_files(tmp_path, CHANNELS[None, None])
    change(paths)
    with open_slide(paths[0]) as slide:
        np.testing.assert_array_equal(slide.levels[0][..., 0], CHANNELS[0])
        [problem] = slide.layout.problems
        assert "planes in 2 other file(s), which are not shown; copy all of them" in problem


@pytest.mark.parametrize("number", range(3))
def test_channels_of_remaining_ome_files_keep_their_names(tmp_path, number):
    paths = stacks.write_ome_files(tmp_path, CHANNELS[None, None])
    for path in paths:
        if path != paths[number]:
            path.unlink()
    with open_slide(paths[number]) as slide:
        assert [channel.name for channel in slide.channels] == [f"stain {number}"]
        np.testing.assert_array_equal(slide.levels[0][..., 0], CHANNELS[number])


@pytest.mark.parametrize("first", ["9", "x"])
def test_missing_ome_files_and_impossible_channels(tmp_path, first):
    paths = stacks.write_ome_files(tmp_path, CHANNELS[None, None])
    content = paths[2].read_bytes()
    assert content.count(b'FirstC="2"') == 1
    paths[2].write_bytes(content.replace(b'FirstC="2"', f'FirstC="{first}"'.encode()))
    paths[0].unlink()
    with open_slide(paths[2]) as slide:
        assert [channel.name for channel in slide.channels] == ["gray"]


def test_possible_planes_among_channels_are_reported(tmp_path):
    paths = stacks.write_ome_files(tmp_path, stacks.stack()[:, :2])
    paths[1].unlink()
    with open_slide(paths[0]) as slide:
        assert [channel.name for channel in slide.channels] == ["channel 0", "channel 1"]
        assert slide.mpp == (0.5, 0.5)
        assert slide.layout.problems[1].endswith("as channels, in file order; they may be planes.")
