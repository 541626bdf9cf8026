import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tifffile

from napari_wsigpu import convert, open_slide
from napari_wsigpu.cli import main
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    ConversionError,
    CorruptSlideError,
    NotASlideError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
)
from tests.writers import gallery, philips, slides


def test_the_content_decides_and_not_the_name(tmp_path):
    slides.write_aperio(tmp_path / "a.jpg", slides.picture(60, 60), ())
    slides.write_pyramid(tmp_path / "b.svs", slides.picture(60, 60), ())
    assert describe(tmp_path / "a.jpg").vendor == "aperio"
    assert describe(tmp_path / "b.svs").vendor == "generic-tiff"


NAMES = "s.ndpi", "s.svs", "s.vsi", "s.scn", "s.czi", "s.mrxs", "s.dcm", "s.ome.tif", "s.ndpis", "s"


@pytest.mark.parametrize("kind", ["aperio", "hamamatsu", "leica", "philips", "ome-tiff", "czi"])
def test_a_slide_is_the_same_under_any_name(tmp_path, kind):
    [path] = gallery.write_all(tmp_path, "text", [kind]).values()
    expected = repr(replace(describe(path), path="", files=()))
    for name in NAMES:
        path = path.rename(path.with_name(name))
        assert repr(replace(describe(path), path="", files=())) == expected


def test_a_copy_without_its_list_of_images_is_cut_off(tmp_path):
    path = tmp_path / "cut.svs"
    path.write_bytes(b"II*\0" + (5000).to_bytes(4, "little") + bytes(1000))
    with pytest.raises(CorruptSlideError, match="is truncated: its list of images starts beyond"):
        describe(path)


def test_copy_truncated_before_an_image(tmp_path):
    path = tmp_path / "cut.tif"
    with tifffile.TiffWriter(path) as file:
        for side in (128, 64):
            file.write(np.zeros((side, side), np.uint8), tile=(64, 64), subfiletype=int(side < 128))
    with tifffile.TiffFile(path) as file:
        second = file.pages[1].offset
    assert describe(path).problems == ()
    os.truncate(path, second)
    [said] = describe(path).problems
    assert said.startswith("The file is truncated: its list of images continues beyond its end")


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_copy_truncated_within_its_description(tmp_path, byteorder, bigtiff):
    path = tmp_path / "cut.ome.tif"
    options = {"byteorder": byteorder, "bigtiff": bigtiff, "ome": True}
    with tifffile.TiffWriter(path, **options) as file:
        file.write(np.zeros((6, 64, 64), np.uint8), metadata={"axes": "CYX"}, tile=(64, 64))
    with tifffile.TiffFile(path) as file:
        text = file.pages[0].tags[270]
    assert text.valueoffset + text.count == path.stat().st_size
    assert describe(path).problems == ()
    os.truncate(path, path.stat().st_size - 1)
    said = describe(path).problems
    assert said[0].startswith("The file is truncated")
    assert "description of an image" in said[0]


def test_problems_name_files_without_their_folder(tmp_path):
    folder = tmp_path / "home" / "jdoe"
    folder.mkdir(parents=True)
    philips.write(folder / "slide.tiff", slides.picture(60, 60), (1,), xml="<broken")
    problems = describe(folder / "slide.tiff").problems
    assert problems
    assert all("'slide.tiff'" in text for text in problems)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_path_is_made_absolute(tmp_path, monkeypatch, kind, relative):
    path = tmp_path / "ein Präparat 標本.tif"
    slides.write_pyramid(path, slides.picture(60, 60), ())
    monkeypatch.chdir(tmp_path)
    layout = describe(kind(path.relative_to(tmp_path) if relative else path))
    assert layout.path == str(path)
    assert layout.file_size == path.stat().st_size
    assert layout.files[0].modified_ns == path.stat().st_mtime_ns


@pytest.mark.parametrize("content", [b"", b"I", b"II*", b"GIF8", b"II\0*" + bytes(99)])
def test_other_files_are_no_slides(tmp_path, content):
    path = tmp_path / "slide.svs"
    path.write_bytes(content)
    with pytest.raises(NotASlideError, match=r"slide\.svs"):
        describe(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(SlideNotFoundError, match=r"none\.svs"):
        describe(tmp_path / "none.svs")


def test_a_folder(tmp_path):
    with pytest.raises((SlideReadError, SlidePermissionError), match=tmp_path.name):
        describe(tmp_path)


def test_path_too_long_for_the_system(tmp_path):
    with pytest.raises(SlideReadError, match=r"^The path '[^']{100}…' is too long") as caught:
        describe(tmp_path / ("x" * 5000))
    assert "try again" not in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links require privileges")
def test_a_loop_of_symbolic_links(tmp_path):
    path = tmp_path / "slide.svs"
    path.symlink_to(path)
    with pytest.raises(SlideReadError, match=r"slide\.svs' can't be read, .* form a loop; correct"):
        describe(path)


@pytest.mark.parametrize("path", ["", b""])
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, path):
    slides.write_aperio(tmp_path / "a.svs", slides.picture(64, 64))
    monkeypatch.chdir(tmp_path)
    for opened in (describe, open_slide):
        with pytest.raises(SlideNotFoundError, match=r"^The path is empty; pass"):
            opened(path)
    with pytest.raises(ConversionError, match=r"^The path of the target is empty"):
        convert("a.svs", path)


def test_a_path_through_a_file(tmp_path):
    (tmp_path / "slide.svs").touch()
    with pytest.raises(SlideNotFoundError, match="There is no file"):
        describe(tmp_path / "slide.svs" / "level")


def test_a_url_with_half_an_address():
    with pytest.raises(SlideNotFoundError, match="is not the URL of an object"):
        describe("http://[::1/a")


@pytest.mark.parametrize("url", ["s3://", "http://", "HTTPS:///", "gs://?key=SECRET"])
def test_a_url_of_nothing(url):
    name = url.partition("?")[0]
    with pytest.raises(SlideNotFoundError, match=f"^'{name}' is not the URL of an object"):
        describe(url)


def test_a_layout_survives_pickling_and_json(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(200, 300))
    layout = describe(path)
    copy = pickle.loads(pickle.dumps(layout))
    assert copy.downsamples == layout.downsamples
    assert copy.metadata == layout.metadata
    assert [item.name for item in copy.associated] == ["thumbnail", "label", "macro"]
    for level, same in zip(layout.levels, copy.levels, strict=True):
        assert level.encoding == same.encoding
        assert (level.grid.offsets == same.grid.offsets).all()
        assert (level.grid.byte_counts == same.grid.byte_counts).all()
    assert json.loads(json.dumps(dict(layout.metadata))) == layout.metadata


def test_no_handle_is_kept(tmp_path, handles_of):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(60, 60))
    describe(path)
    assert handles_of(path) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.svs")
    with pytest.raises(NotASlideError, match=r"pipe\.svs' is not a regular file"):
        describe(tmp_path / "pipe.svs")


def test_impossible_path():
    with pytest.raises(SlideNotFoundError, match="There is no file"):
        describe("a\0b.svs")


def test_a_damaged_file_prints_nothing(tmp_path):
    path = tmp_path / "bad.tif"
    path.write_bytes(b"II*\0" + bytes(100))
    program = (
        f"from napari_wsigpu import *\ntry: open_slide({str(path)!r})\nexcept SlideError: pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("kind", ["planes", "companion"])
def test_names_of_other_files_in_ome_xml_are_hidden(tmp_path, capsys, kind, options):
    head = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:1">'
    plane = (
        '<TiffData IFD="0" FirstZ="{}" PlaneCount="1"><UUID FileName="{}">urn:uuid:{}</UUID>'
        "</TiffData>"
    )
    planes = plane.format(0, "a.ome.tif", 1) + plane.format(1, "DOE_JANE_z2.ome.tif", 2)
    inner = {
        "planes": '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" '
        f'SizeX="64" SizeY="64" SizeC="1" SizeZ="2" SizeT="1">{planes}</Pixels></Image>',
        "companion": '<BinaryOnly MetadataFile="DOE_JANE.companion.ome" UUID="urn:uuid:3"/>',
    }
    pixels = np.zeros((64, 64), np.uint8)
    xml = f"{head}{inner[kind]}</OME>"
    tifffile.imwrite(tmp_path / "a.ome.tif", pixels, description=xml, metadata=None)
    assert main(["info", *options, str(tmp_path / "a.ome.tif")]) == 0
    printed = capsys.readouterr()
    assert "The OME-XML" in printed.out
    assert "JANE" not in printed.out + printed.err


def test_a_damaged_description_is_not_quoted(tmp_path):
    said = '{"shape": [0x1F, 96, 46, 3], "name": "Jane Doe"}'
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((96, 46, 3), np.uint8), metadata=None, description=said)
    [problem] = describe(path).problems
    assert "contradicts the pages" in problem
    assert "Jane" not in problem
