"""A text that stands wherever a person can write is found in nothing that leaves by itself."""

import json
import logging
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from napari_wsigpu import SlideError, convert, open_slide
from napari_wsigpu.cli import main
from napari_wsigpu.slide.facts import facts, file_report
from napari_wsigpu.storage.remote.disk_cache import disk_cache
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.fakes.rangeserver import RangeServer
from tests.slide.test_opening import in_child
from tests.writers import gallery, zarrs

MARK = "Zyxqmark"
FOLDED = MARK.casefold()
# Others are of the same texts, and but other pixels.
SAME = ("jpeg-2000", "sharded-zarr", "blosc-zarr")
FORMATS = [name for name in gallery.WRITERS if not name.startswith("tiff-") and name not in SAME]
SUFFIXES = (".tif", ".ome.tif", ".zarr")
SILENT = ("imagej", "ndtiff", "micromanager")  # nothing of what they say is kept


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marked")
    return gallery.write_all(folder, MARK, FORMATS)


@pytest.fixture(params=FORMATS)
def path(written, request):
    return written[request.param]


def check(text, *allowed):
    """Fail where the mark stands, and say what stands around it."""
    for word in allowed:
        text = text.replace(word, "")
    at = text.casefold().find(FOLDED)
    assert at < 0, text[max(0, at - 200) : at + 200]


def everything(folder):
    """Return the names of all files and what is in them, as text."""
    files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    parts = [str(file.relative_to(folder.parent)).encode() for file in files]
    parts += [file.read_bytes() for file in files if file.is_file()]
    return b"\n".join(parts).decode("latin1")


def names_of_files(slide):
    return [Path(file.path).name for file in slide.layout.files]


def test_the_command_line(path, capsys):
    assert main(["info", str(path)]) == main(["info", str(path), "--json"]) == 0
    assert main(["doctor", str(path)]) == main(["doctor", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    check(shown.out + shown.err)
    assert main(["info", str(path), "--json", "--private"]) == 0
    if path.parent.name not in SILENT:
        assert MARK in json.dumps(json.loads(capsys.readouterr().out))


def test_layers_and_docks(path):
    with open_slide(path, "cpu") as slide:
        layers = slide_layers(slide)
        for _, attributes, _ in layers:
            check(f"{attributes}")
        check(f"{facts(slide)} {file_report(slide, private=False)}")
        check(f"{slide!r} {slide} {slide.stats()} {slide.levels} {slide.associated_images}")
        pickled = pickle.dumps([slide, slide.levels, slide.opener("cpu")])
        check(pickled.decode("latin1"), *slide.path.split("/"), *names_of_files(slide))
        with pickle.loads(pickled)[0] as again:
            assert again.metadata == slide.metadata
            assert list(again.labels) == list(slide.labels)
        shown = f"{slide_layers(slide, private=True)} {file_report(slide, private=True)}"
        assert MARK in shown or path.parent.name in SILENT


def spoken(slide):
    """Return all that a slide, its parts and the slides of its labels and planes say of themselves.

    The texts of pickles are included.
    """
    images = [slide, *slide.labels.values()]
    if slide.planes.names:
        images.append(slide.plane(**dict.fromkeys(slide.planes.names, 0)))
    texts = []
    for image in images:
        parts = [image, image.levels, *image.levels, *image.pyramid, image.associated_images]
        parts += [
            image.layout,
            image.planes,
            image.opener("cpu"),
            image.stats(),
            *image.associated_images.values(),
        ]
        texts += [f"{part!r} {part!s} {dir(part)}" for part in parts]
        texts += [image._repr_html_(), pickle.dumps([image, image.levels]).decode("latin1")]
    return "\n".join(texts)


@pytest.fixture(scope="module")
def spawned():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda work, slide: pool.submit(work, slide).result(120)


def test_what_slides_say_in_any_process(path, spawned):
    with open_slide(path, "cpu") as slide:
        allowed = slide.path.split("/"), names_of_files(slide)
        for text in (
            spoken(slide),
            spoken(pickle.loads(pickle.dumps(slide))),
            spawned(spoken, slide),
        ):
            check(text, *allowed[0], *allowed[1])
        if hasattr(os, "fork"):
            check(in_child(lambda: spoken(slide)), *allowed[0], *allowed[1])


def test_plates(tmp_path):
    """An image of a well opens; neither it nor the plate's refusal says the names."""
    plate, well = tmp_path / "plate.zarr", f"{MARK}/{MARK} 1"
    wells = {"name": MARK, "rows": [{"name": MARK}], "wells": [{"path": well}]}
    zarrs.write_group(plate, {"plate": {**wells, "columns": [{"name": f"{MARK} 1"}]}})
    zarrs.write_group(plate / well, {"well": {"images": [{"path": MARK}]}})
    pixels = [gallery.CHANNELS]
    zarrs.write_image(plate / well / MARK, pixels, more={"omero": {"name": MARK}, MARK: MARK})
    for folder in (plate, plate / well):
        with pytest.raises(SlideError, match="with many images") as refused:
            open_slide(folder, "cpu")
        check(f"{refused.value} {refused.value!r}", str(folder))
    with open_slide(plate / well / MARK, "cpu") as slide:
        check(spoken(slide), *str(plate / well).split("/"))
        convert(slide.path, tmp_path / "converted.zarr")
    check(everything(tmp_path / "converted.zarr"))


def test_converted_slides_and_logs(path, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    suffix = SUFFIXES[FORMATS.index(path.parent.name) % len(SUFFIXES)]
    target = tmp_path / f"converted{suffix}"
    done = convert(path, target)
    check(everything(target) + "".join(done.notes) + caplog.text)
    with open_slide(target) as slide:
        check(f"{slide.metadata} {slide.channels}")


@pytest.mark.parametrize("name", ["aperio", "dicom", "mirax", "ome-tiff", "ome-zarr"])
def test_what_is_private_travels_when_it_shall(name, written, tmp_path):
    convert(written[name], tmp_path / "converted.tif", private=True)
    assert MARK in everything(tmp_path / "converted.tif")


def test_damage(written, tmp_path, caplog):
    """What is said of damaged tiles doesn't name the label image that they are of."""
    caplog.set_level(logging.DEBUG)
    path = shutil.copytree(written["ome-zarr"], tmp_path / "slide.zarr")
    with open_slide(path, "cpu") as slide:
        for chunk in path.rglob("c/**/*"):
            if chunk.is_file():
                chunk.write_bytes(bytes(99))
        texts = []
        for image in (slide, *slide.labels.values()):
            image.on_failed_tile(lambda *words: texts.append(f"{words}"))
            with pytest.raises(SlideError) as raised:
                image.read_region((0, 0), image.dimensions)
            texts.append(f"{raised.value!r} {raised.value} {image.stats()}")
            image.level_array(0, tolerant=True)[...]
        assert len(texts) > 2
        check(f"{texts}{caplog.text}")


def test_names_of_the_disk_cache(tmp_path):
    pytest.importorskip("obstore")
    path = gallery.WRITERS["aperio"](tmp_path, MARK)
    with (
        RangeServer(path.parent) as server,
        open_slide(f"{server.url(path.name)}?token={MARK}") as slide,
    ):
        slide.read_region((0, 0), (50, 50))
        check(f"{slide!r} {slide.path}")
    found = list(disk_cache().folder.rglob("*"))
    assert found
    check(" ".join(file.name for file in found))
