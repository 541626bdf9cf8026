"""DICOM files with any name, in subfolders, and on media with a DICOMDIR."""

import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from npe2 import PluginManifest
from npe2._plugin_manager import _ContributionsIndex
from pydicom.fileset import FileSet
from wsidicom import WsiDicom

import napari_wsigpu
from napari_wsigpu import open_slide
from napari_wsigpu.formats.dicom import dicom
from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.viewer.contributions.slide_folder import is_slide_folder, slides_in
from tests.writers import dicomslides, slides

PIXELS = slides.picture(300, 500)
NAMES = ("{}.dcm", "{}.DICOM", "IM{:06}", "1.2.840.113619.2.{}", "2.25.123.{}")


def write(folder, name="{}.dcm", **options):
    """Write a slide of three levels whose files have names of this form."""
    folder.mkdir(parents=True, exist_ok=True)
    dicomslides.write_slide(folder, PIXELS, kind="raw", **options)
    for index in (7, 8, 9):
        (folder / f"{index}.dcm").rename(folder / name.format(index))
    return folder / name.format(9)


def check(path, files=3, problems=()):
    with open_slide(path, device="cpu") as slide:
        assert slide.level_dimensions == ((500, 300), (250, 150), (125, 75))
        assert len(slide.layout.files) == files
        assert [
            text[: len(each)] for text, each in zip(slide.layout.problems, problems, strict=True)
        ] == [*problems]
        np.testing.assert_array_equal(slide.levels[0][...], PIXELS)


def readers(path):
    """Return whether napari offers this plugin for a file of this name."""
    index = _ContributionsIndex()
    index.reindex(PluginManifest.from_file(f"{napari_wsigpu.__path__[0]}/napari.yaml"))
    found = index.iter_compatible_readers([str(path)])
    expected = {"napari-wsigpu.get_reader"}
    if Path(path).suffix.lower() == ".dcm":  # images and annotations
        expected.add("napari-wsigpu.get_geojson_reader")
    return {reader.command for reader in found} == expected


@contextmanager
def file_set(path=None):
    """Open a DICOMDIR with pydicom, whose temporary folder is deleted only on request."""
    files = FileSet(path)
    yield files
    files._stage["t"].cleanup()


def listed(folder):
    """Return the paths that a DICOMDIR lists, and the heights of these images."""
    with file_set(folder / "DICOMDIR") as files:
        return {Path(each.path): each.load().TotalPixelMatrixRows for each in files}


@pytest.fixture
def medium(tmp_path):
    """Two slides on a medium, as pydicom writes it, and the folder of its DICOMDIR."""
    with file_set() as files:
        for series, size in (("1.2.3", 300), ("1.2.4", 100)):
            levels = PIXELS[:size], slides.average(PIXELS[:size], 2)
            for number, pixels in enumerate(levels, start=1):
                dataset = dicomslides.instance(
                    *(pixels, "raw"),
                    SeriesInstanceUID=series,
                    SeriesNumber=1,
                    InstanceNumber=number,
                    StudyDate="20240101",
                    StudyTime="120000",
                    StudyID="1",
                    StudyDescription="",
                    AccessionNumber="",
                    spacing=(0.0005 * number, 0.00025 * number),
                )
                files.add(dataset)
        files.write(tmp_path / "medium")
    return tmp_path / "medium"


@pytest.mark.parametrize("name", NAMES)
def test_files_with_any_name(tmp_path, name):
    path = write(tmp_path / "slide", name)
    with WsiDicom.open(sorted((tmp_path / "slide").iterdir())) as oracle:
        assert [level.size.to_tuple() for level in oracle.pyramid] == [
            (500, 300),
            (250, 150),
            (125, 75),
        ]
    for each in (path, path.parent):
        check(each)
    assert readers(path)


@pytest.mark.parametrize("name", ["Slidedat.ini", "A.SVS", "a b.DCM", "IM000001", "1.2.3.45"])
def test_names_that_napari_offers_this_reader_for(name):
    assert readers(name)


@pytest.mark.parametrize("name", ["a.png", "notes", "Makefile", "1.2 b.h5", "v1.2.3.tar", "b.1"])
def test_other_names_are_left_to_other_readers(name):
    assert not readers(name)


@pytest.mark.parametrize("below", ["series", "patient/study/series"])
def test_a_slide_in_a_subfolder(tmp_path, below):
    root = tmp_path / "export"
    write(root / below, "{}")
    (root / "readme.txt").write_text("x")
    check(root)
    assert is_slide_folder(root)


def test_levels_in_a_folder_each(tmp_path):
    write(tmp_path / "a")
    for number in (7, 8):
        (tmp_path / str(number)).mkdir()
        shutil.move(tmp_path / f"a/{number}.dcm", tmp_path / f"{number}/{number}.dcm")
    check(tmp_path)


def test_slides_in_subfolders(tmp_path):
    """`open_slide` opens the largest; napari opens each."""
    root = tmp_path / "export"
    write(root / "patient/study/a")
    folder = root / "patient/study/b"
    folder.mkdir()
    small = dicomslides.instance(PIXELS[:90], "raw", SeriesInstanceUID="1.2.3")
    dicomslides.save(folder / "1.2.840.7", small)
    check(root, problems=["The folder holds 1 more DICOM series"])
    assert not is_slide_folder(root)
    expected = [str(root / "patient/study" / name) for name in "ab"]
    assert slides_in(root, lambda _: []) == expected
    assert slides_in(root / "patient/study", lambda _: []) == expected


def test_the_search_is_short(tmp_path, monkeypatch):
    write(tmp_path / "1/2/3/4/5")
    assert next(dicom.slide_folders(tmp_path), None) is None
    assert next(dicom.slide_folders(tmp_path / "1"), None) == tmp_path / "1/2/3/4/5"
    monkeypatch.setattr(dicom, "MOST_ENTRIES", 3)
    assert next(dicom.slide_folders(tmp_path / "1"), None) is None
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/loop").symlink_to(tmp_path / "loop")
    assert next(dicom.slide_folders(tmp_path / "loop"), None) is None
    with pytest.raises(SlideError):
        open_slide(tmp_path / "loop")


@pytest.mark.parametrize("lower", [False, True])
def test_dicomdir_names_its_files(medium, lower):
    assert sorted(listed(medium).values()) == [50, 100, 150, 300]
    if lower:
        for path in sorted(medium.rglob("*"), reverse=True):
            if path.name != "DICOMDIR":
                path.rename(path.with_name(path.name.lower()))
    for path in (medium / "DICOMDIR", medium):
        with open_slide(path, device="cpu") as slide:
            assert slide.level_dimensions == ((500, 300), (250, 150))
            np.testing.assert_array_equal(slide.levels[0][...], PIXELS)
            [problem] = slide.layout.problems
            assert problem.startswith("The folder holds 1 more DICOM series")
            with pickle.loads(pickle.dumps(slide)) as again:
                np.testing.assert_array_equal(again.levels[0][...], PIXELS)
    assert readers(medium / "DICOMDIR")
    assert len(slides_in(medium, lambda _: [])) == 2


def test_dicomdir_with_missing_files(medium):
    found = listed(medium)
    for path, height in found.items():
        if height != 300:
            path.unlink()
    with open_slide(medium / "DICOMDIR", device="cpu") as slide:
        assert slide.layout.problems == ("3 of 4 listed slide files are missing.",)
    next(path for path, height in found.items() if height == 300).unlink()
    with pytest.raises(
        UnsupportedSlideError, match=r"None of the 4 slide files listed in '.*DICOMDIR'"
    ):
        open_slide(medium / "DICOMDIR")


def test_dicomdir_must_not_name_files_elsewhere(medium):
    """Only two files remain listed: those whose names are intact."""
    path = medium / "DICOMDIR"
    content = path.read_bytes()
    main = next(each for each, height in listed(medium).items() if height == 300)
    stated = "\\".join(main.relative_to(medium).parts).encode()
    assert content.count(stated) == 1
    medium.with_name("IM").write_bytes(main.read_bytes())
    path.write_bytes(content.replace(stated, b"..\\IM".ljust(len(stated))))
    with open_slide(path, device="cpu") as slide:
        assert all(Path(file.path).is_relative_to(medium) for file in slide.layout.files)
        assert slide.dimensions != (500, 300)


def test_damaged_or_other_dicomdir(medium):
    path = medium / "DICOMDIR"
    content = path.read_bytes()
    path.write_bytes(content[:400])
    with pytest.raises(SlideError, match="DICOMDIR'"):
        open_slide(path)
    other = b"1.2.840.10008.5.1.4.1.1.2".ljust(30, b"\0")
    path.write_bytes(content.replace(b"1.2.840.10008.5.1.4.1.1.77.1.6", other))
    with pytest.raises(NotASlideError, match="not a whole-slide image"):
        open_slide(path)
