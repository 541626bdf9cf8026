"""Arrangement of slides in a viewer: a single one, all at their positions, or side by side."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from napari.layers import Image, Points, Shapes
from qtpy.QtCore import QTimer

from napari_wsigpu.model.errors import LayerError
from napari_wsigpu.viewer.annotations.annotation_layers import (
    CLASS,
    PADDING,
    SLIDE,
    annotation_layers_of,
    colored_parts,
    drawing_layer,
    draws,
    holds_annotations,
    is_padding,
    layer_to_draw_in,
    set_new_objects,
)
from napari_wsigpu.viewer.layers.slide_layers import slide_name, slide_of
from napari_wsigpu.viewer.window.main_window import fit_to, moved_view
from napari_wsigpu.viewer.window.notifications import show_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers.placement import Attributes

VIEW = "view"  # metadata key of a slide's layer: where the user left it for another slide
HIDDEN = "hidden"  # metadata key of a hidden slide's layer: whether the user had hidden it before
ASSOCIATED = "associated"  # metadata key of an associated image's layer: path of its slide


def slides_of(viewer: Viewer) -> list[Slide]:
    """Return the slides of a viewer, in the order of its layers."""
    found = (slide_of(layer) for layer in viewer.layers)
    return list(dict.fromkeys(slide for slide in found if slide is not None))


def layers_of(viewer: Viewer, slide: Slide) -> list[Layer]:
    """Return the layers that show a slide."""
    return [layer for layer in viewer.layers if slide_of(layer) is slide]


def active_slide(viewer: Viewer, kept: Slide | None = None) -> Slide | None:
    """Return the active layer's slide, else `kept`, else the last visible slide, else the last."""
    active = slide_of(viewer.layers.selection.active)
    slides = slides_of(viewer)
    if active is not None or not slides:
        return active
    visible = [each for each in map(slide_of, filter(_is_visible, viewer.layers)) if each]
    return kept if kept in slides else [*slides, *visible][-1]


def layer_of(viewer: Viewer, slide: Slide | None) -> Layer | None:
    """Return a layer of the slide, preferably the active one."""
    layers = [viewer.layers.selection.active, *viewer.layers]
    return next((each for each in layers if each and slide_of(each) is slide), None)


def fit_slide(viewer: Viewer, slide: Slide) -> None:
    """Fit a slide to the canvas, or all slides to their cells if the grid is on.

    Visible associated images of the slide are fitted with it.
    """
    images = [
        layer
        for layer in viewer.layers
        if layer.visible and layer.metadata.get(ASSOCIATED) == slide.path
    ]
    own = [*layers_of(viewer, slide), *images]
    fit_to(viewer, viewer.layers if viewer.canvas.grid.enabled else own)


def is_shown(viewer: Viewer, slide: Slide) -> bool:
    """Whether a layer of the slide is visible."""
    return any(layer.visible for layer in layers_of(viewer, slide))


def show_annotations(viewer: Viewer, path: str, *, visible: bool = True) -> None:
    """Show or hide the annotations, heat maps and associated images of the slide at `path`."""
    _show_layers([layer for layer in viewer.layers if _owner(layer) == path], visible=visible)


def hide_like_slide(
    viewer: Viewer | None, layer: Layer | None, attributes: Iterable[Attributes], name: str
) -> None:
    """Hide new layers from a file if the slide that they belong to is hidden, and say so.

    Parameters
    ----------
    viewer : Viewer or None
        The viewer, which doesn't have the new layers yet.
    layer : Layer or None
        A layer of the slide.
    attributes : iterable of dict
        Attributes of the new layers.
    name : str
        Name of the file.
    """
    slide = slide_of(layer)
    if viewer is None or slide is None or is_shown(viewer, slide):
        return
    for each in attributes:
        each["visible"] = False
        each.setdefault("metadata", {})[HIDDEN] = False
    # napari will activate the new layers; tools and the next file are for the slide on screen.
    QTimer.singleShot(0, partial(activate_shown, viewer))
    show_info(f"'{name}' belongs to '{slide_name(slide)}'; show that slide to see it.")


def show_another(viewer: Viewer) -> None:
    """Show the active slide if all slides are hidden, or else activate a visible one."""
    slide = active_slide(viewer)
    if slide is not None and not any(is_shown(viewer, each) for each in slides_of(viewer)):
        show_only(viewer, slide)
    else:
        activate_shown(viewer)


def activate_shown(viewer: Viewer) -> None:
    """Activate a visible slide if the active layer belongs to a hidden one.

    Docks and keys would otherwise work on a slide that the user does not see.
    """
    active = viewer.layers.selection.active
    slide = slide_of(active)
    path = _owner(active) if active is not None and slide is None else slide and slide.path
    slides = slides_of(viewer)
    shown = [each for each in slides if is_shown(viewer, each)]
    if shown and path in {each.path for each in slides} - {each.path for each in shown}:
        viewer.layers.selection.active = layers_of(viewer, shown[-1])[-1]


def show_next(viewer: Viewer, step: int = 1) -> None:
    """Show only the slide `step` places after the active one; the first follows the last."""
    slides, active = slides_of(viewer), active_slide(viewer)
    if active is not None and len(slides) > 1:
        show_only(viewer, slides[(slides.index(active) + step) % len(slides)])


def show_only(viewer: Viewer, slide: Slide) -> None:
    """Show only one slide and its annotations where the user left it, and keep the tool."""
    before = viewer.layers.selection.active
    keep_view(viewer)
    drew = isinstance(before, Shapes | Points) and holds_annotations(before) and draws(before)
    tool = str(before.mode) if drew else ""  # napari resets it when a layer is hidden
    _leave_grid(viewer)
    slides = slides_of(viewer)
    paths = {each.path for each in slides}
    shown = {each for each in slides if is_shown(viewer, each)}
    shown_paths = {each.path for each in shown}
    for layer in viewer.layers:
        own = slide_of(layer)
        path = _owner(layer) if own is None else own.path
        if path in paths:
            was_shown = path in shown_paths if own is None else own in shown
            is_to_show = path == slide.path if own is None else own is slide
            if was_shown is not is_to_show:
                _show_layers([layer], visible=is_to_show)
            elif not is_to_show:
                layer.visible = False
    layers = layers_of(viewer, slide)
    viewer.layers.selection.active = layers[-1]
    if tool and _owner(before) in paths:
        take_tool(viewer, slide, before, tool)
    view = layers[-1].metadata.pop(VIEW, None)
    if view is None:
        fit_to(viewer, layers)
    else:
        camera = viewer.scene.camera
        camera.center, camera.zoom, camera.angles = view


def keep_view(viewer: Viewer, new: Sequence[Slide] = ()) -> None:
    """Remember where the user has moved the only slide that is shown, apart from new ones."""
    shown = [each for each in slides_of(viewer) if is_shown(viewer, each) and each not in new]
    if len(shown) == 1 and not viewer.canvas.grid.enabled:
        layers_of(viewer, shown[0])[-1].metadata[VIEW] = moved_view(viewer)


def has_copy(viewer: Viewer, slide: Slide) -> bool:
    """Whether another slide was opened from the same file; both share annotations."""
    return any(each is not slide and each.path == slide.path for each in slides_of(viewer))


def remove_slide(viewer: Viewer, slide: Slide) -> None:
    """Remove a slide's layers, and show the slide that follows it in the list.

    Layers that another open copy of the same file shares with it, such as annotations, remain.
    """
    slides = slides_of(viewer)
    others = slides[slides.index(slide) + 1 :] + slides[: slides.index(slide)]
    layers = layers_of(viewer, slide)
    if not has_copy(viewer, slide):
        layers += [layer for layer in viewer.layers if _owner(layer) == slide.path]
    if others and not viewer.canvas.grid.enabled:
        show_only(viewer, others[0])
    for layer in layers:
        viewer.layers.remove(layer)


def show_all(viewer: Viewer) -> None:
    """Show all slides at their own positions, below all annotations."""
    keep_view(viewer)
    _leave_grid(viewer)
    _reveal(viewer)
    raise_annotations(viewer, slides_of(viewer))
    fit_to(viewer, viewer.layers)


def raise_annotations(viewer: Viewer, slides: Sequence[Slide]) -> None:
    """Move annotations and heat maps of slides above all other layers."""
    paths = {slide.path for slide in slides}
    for layer in [each for each in viewer.layers if each.metadata.get(SLIDE) in paths]:
        viewer.layers.move(viewer.layers.index(layer), len(viewer.layers))


def lower_images(viewer: Viewer) -> None:
    """Move all images, such as slides and heat maps, below layers of other kinds."""
    others = [index for index, each in enumerate(viewer.layers) if not isinstance(each, Image)]
    viewer.layers.move_multiple(others, len(viewer.layers))


def show_side_by_side(viewer: Viewer) -> None:
    """Show each slide in its own cell of napari's grid; all cells move and zoom together.

    Raises
    ------
    LayerError
        See `line_up`.
    """
    keep_view(viewer)
    line_up(viewer)
    _reveal(viewer)
    viewer.canvas.grid.shape = (-1, -1)
    viewer.canvas.grid.enabled = True
    fit_to(viewer, viewer.layers)


def line_up(viewer: Viewer) -> None:
    """Sort layers so that each cell of napari's grid holds the layers of one slide.

    All cells of napari's grid hold the same number of layers: slides with fewer annotation layers
    get empty ones.

    Raises
    ------
    LayerError
        If slides have different numbers of channels, or other layers are visible.
    """
    slides = slides_of(viewer)
    groups = [layers_of(viewer, slide) for slide in slides]
    channels = {len(group) for group in groups}
    rest = [layer for layer in viewer.layers if slide_of(layer) is None]
    for slide, group in zip(slides, groups, strict=True):
        own = [layer for layer in rest if layer.metadata.get(SLIDE) == slide.path]
        group += own
        rest = [layer for layer in rest if layer not in own]
    shown = [layer for layer in rest if layer.visible]
    if shown:
        raise LayerError(
            f"The layer '{shown[0].name}' belongs to no slide; hide it to see slides side by side."
        )
    if len(channels) > 1:
        raise LayerError(
            "The slides have different numbers of channels; show only slides with the same number "
            "side by side."
        )
    count, active = max(map(len, groups)), viewer.layers.selection.active
    for slide, group in zip(slides, groups, strict=True):
        while len(group) < count:
            group.append(drawing_layer(viewer, group[0], slide, points=False))
            group[-1].metadata[PADDING] = True
    viewer.layers.selection.active = active
    # The layers of each cell must be consecutive; hidden layers of other kinds come last.
    order = [layer for group in groups for layer in group]
    for index, layer in enumerate([*order, *rest]):
        viewer.layers.move(viewer.layers.index(layer), index)
    viewer.canvas.grid.stride = count


def cell_at(viewer: Viewer, cell: tuple[int, int]) -> Slide | None:
    """Return the slide in a cell of napari's grid; None without a slide or without a grid."""
    if not viewer.canvas.grid.enabled:
        return None
    layers = viewer.layers
    shown = (slide_of(layers[each]) for each in viewer.canvas.grid.contents_at(cell, layers))
    return next((slide for slide in shown if slide is not None), None)


def take_tool(viewer: Viewer, slide: Slide, source: Shapes | Points, tool: str) -> None:
    """Activate a slide and one of its layers with a tool, and the class of another layer."""
    kind = Points if isinstance(source, Points) else Shapes
    slide_layer = layers_of(viewer, slide)[-1]
    own = annotation_layers_of(viewer, slide.path)
    target = layer_to_draw_in(own, kind)
    if target is None:
        target = drawing_layer(viewer, slide_layer, slide, points=kind is Points)
        target.metadata[PADDING] = True  # if nothing is drawn, it goes with the slide
        if viewer.canvas.grid.enabled:
            with suppress(LayerError):
                line_up(viewer)
    target.visible = True
    viewer.layers.selection.active = slide_layer  # docks follow the slide of an image
    viewer.layers.selection.active = target
    target.mode = tool
    target.selected_data = set()
    defaults = source.feature_defaults
    texts = {CLASS: defaults[CLASS].iloc[0]} if CLASS in defaults else {}
    colors = {part: getattr(source, f"current_{part}_color") for part in colored_parts(source)}
    set_new_objects(target, texts, colors)


def _leave_grid(viewer: Viewer) -> None:
    """Show layers in one cell, and remove those that only filled cells."""
    viewer.canvas.grid.enabled = False
    for layer in filter(is_padding, list(viewer.layers)):
        viewer.layers.remove(layer)


def _owner(layer: Layer) -> str | None:
    """Return the path of the slide that a layer with other content belongs to, or None."""
    path: str | None = layer.metadata.get(SLIDE, layer.metadata.get(ASSOCIATED))
    return path


def _is_visible(layer: Layer) -> bool:
    return bool(layer.visible)


def _reveal(viewer: Viewer) -> None:
    """Show all slides with their annotations, except for layers that the user has hidden."""
    for slide in slides_of(viewer):
        if not is_shown(viewer, slide):
            _show_layers(layers_of(viewer, slide), visible=True)
            show_annotations(viewer, slide.path)


def _show_layers(layers: Iterable[Layer], *, visible: bool) -> None:
    """Show or hide layers with their slide; those that the user has hidden stay hidden."""
    for layer in layers:
        if visible:
            layer.visible = not layer.metadata.pop(HIDDEN, False)
        else:
            layer.metadata.setdefault(HIDDEN, not layer.visible)
            layer.visible = False
