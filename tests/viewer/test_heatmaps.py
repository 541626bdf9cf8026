"""Patches and attention scores of CLAM and TRIDENT as layers over a slide."""

import numpy as np
import pytest
from napari.components import ViewerModel
from napari.layers import Image, Layer
from napari.utils.notifications import notification_manager

from napari_wsigpu import convert, open_slide
from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.geojson import write_geojson
from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.viewer.annotations.annotation_layers import SLIDE, layer_name
from napari_wsigpu.viewer.contributions import geojson_files, heatmap_files
from napari_wsigpu.viewer.contributions.geojson_files import get_geojson_reader
from napari_wsigpu.viewer.contributions.heatmap_files import get_heatmap_reader
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_layers, slide_of
from napari_wsigpu.viewer.view.arrangement import show_only

h5py = pytest.importorskip("h5py")
CORNERS = np.array([(x, y) for y in (256, 512) for x in (512, 768, 1024)])
SCORES = np.linspace(0, 1, 6)[:, None]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "scores.h5"
    with h5py.File(path, "w") as file:
        file["coords"], file["attention_scores"] = CORNERS, SCORES
    return path


def test_heatmaps_lie_on_their_patches(path, monkeypatch):
    model = ViewerModel()
    monkeypatch.setattr(heatmap_files.napari, "current_viewer", lambda: model)
    with open_slide(sample_path(), "cpu") as slide:
        layer = model.add_layer(Layer.create(*slide_layers(slide)[0]))
        layer.translate = (30, 40)
        [data] = get_heatmap_reader(str(path))(str(path))
        heatmap = model.add_layer(Layer.create(*data))
        assert isinstance(heatmap, Image)
        assert heatmap.name == "he_phantom scores heat map"
        assert heatmap.units == layer.units
        assert heatmap.metadata[SLIDE] == slide.path
        assert heatmap.contrast_limits == [0, 1]
        assert 0 < heatmap.opacity < 1
        for (x, y), score in zip(CORNERS, SCORES[:, 0], strict=True):
            for corner in ((y + 1, x + 1), (y + 254, x + 254)):
                assert heatmap.get_value(layer.data_to_world(corner), world=True) == pytest.approx(
                    score
                )


@pytest.mark.parametrize(
    ("scores", "reason"),
    [(None, "'he_phantom.h5' has no scores"), (0.5, "All scores in 'he_phantom.h5' are equal")],
)
def test_patches_without_scores_have_one_color(tmp_path, monkeypatch, scores, reason):
    path = tmp_path / "he_phantom.h5"
    with h5py.File(path, "w") as file:
        file["coords"] = CORNERS
        if scores is not None:
            file["attention_scores"] = np.full(len(CORNERS), scores)
    model = ViewerModel()
    monkeypatch.setattr(heatmap_files.napari, "current_viewer", lambda: model)
    with open_slide(sample_path(), "cpu") as slide:
        model.add_layer(Layer.create(*slide_layers(slide)[0]))
        [(image, attributes, _)] = get_heatmap_reader(str(path))(str(path))
    assert attributes["name"] == "he_phantom patches"
    assert np.unique(image[np.isfinite(image)]) == attributes["contrast_limits"][1]
    [said] = notification_manager.records
    assert said.message == f"{reason}, so its patches have one color."


@pytest.mark.parametrize("name", ["dark", "dark_patches"])
def test_a_file_belongs_to_the_slide_with_its_name(path, tmp_path, monkeypatch, name):
    model, other = ViewerModel(), tmp_path / "dark.tif"
    convert(sample_path(), other, region=(0, 0, 2048, 2048))
    monkeypatch.setattr(heatmap_files.napari, "current_viewer", lambda: model)
    named = path.rename(tmp_path / f"{name}.h5")
    with open_slide(other, "cpu") as dark, open_slide(sample_path(), "cpu") as slide:
        for each in (dark, slide):
            layer = model.add_layer(Layer.create(*slide_layers(each)[0]))
        assert model.layers.selection.active is layer
        [(_, attributes, _)] = get_heatmap_reader(str(named))(str(named))
        assert attributes["metadata"][SLIDE] == dark.path
        assert "visible" not in attributes
        model.layers[0].visible = False
        [(_, attributes, _)] = get_heatmap_reader(str(named))(str(named))
        assert attributes["visible"] is False
        said = notification_manager.records[-1].message
        assert said == f"'{name}.h5' belongs to 'dark'; show that slide to see it."
        monkeypatch.setattr(geojson_files.napari, "current_viewer", lambda: model)
        outlines = tmp_path / "dark.geojson"
        write_geojson(outlines, [Annotation("polygon", (CORNERS[[0, 1, 3]].astype(float),))])
        [(_, attributes, _)] = get_geojson_reader(str(outlines))(str(outlines))
        assert attributes["visible"] is False
        renamed = named.rename(tmp_path / "scores.h5")
        [(_, attributes, _)] = get_heatmap_reader(str(renamed))(str(renamed))
        assert attributes["metadata"][SLIDE] == slide.path
        assert "visible" not in attributes


@pytest.mark.parametrize(
    ("title", "kind", "name"),
    [
        ("he_phantom", "heat map", "he_phantom heat map"),
        ("he_phantom_patches", "patches", "he_phantom patches"),
        ("he_phantom2", "heat map", "he_phantom he_phantom2 heat map"),
        ("Recovered", "annotations", "he_phantom Recovered annotations"),
    ],
)
def test_names_of_layers_state_their_slide(title, kind, name):
    with open_slide(sample_path(), "cpu") as slide:
        assert layer_name(slide, title, kind) == name


def test_heatmaps_need_a_slide(path, monkeypatch):
    monkeypatch.setattr(heatmap_files.napari, "current_viewer", ViewerModel)
    with pytest.raises(AnnotationError, match=r"'.*scores.h5' holds patches.*open the slide first"):
        get_heatmap_reader(str(path))(str(path))


def test_other_files_are_left_to_other_readers():
    assert get_heatmap_reader("slide.svs") is None
    assert get_heatmap_reader(["a.h5", "b.svs"]) is None


@pytest.mark.window
def test_dropped_heatmaps_show_their_slide(viewer, path):
    [layer] = viewer.open(str(sample_path()), plugin="napari-wsigpu")
    [heatmap] = viewer.open(str(path), plugin="napari-wsigpu")
    shown = []
    for heatmap.visible in (True, False):
        shown.append(viewer.screenshot(size=(400, 600), flash=False))
    changed = np.any(shown[0] != shown[1], axis=-1)
    # Six patches of 256 pixels on a slide of which the canvas shows all.
    assert 0 < changed.mean() < 0.5
    heatmap.visible = True
    show_only(viewer, slide_of(layer))
    assert heatmap.visible
