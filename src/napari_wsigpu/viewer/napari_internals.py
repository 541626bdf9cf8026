"""Every private part of napari and vispy that this plugin uses, and what is lost without it.

napari has announced that its private attributes will become unavailable to plugins. `INTERNALS`
lists the ones in use; look them up with `Internal.get`. If one is missing, slides are still shown
exactly, and `wsigpu doctor` reports which features become slower or less convenient.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import napari
import numpy as np
from qtpy.compat import isalive
from qtpy.QtWidgets import QApplication, QMainWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari import Viewer
    from napari._qt.dialogs.qt_notification import NapariQtNotification
    from napari._qt.qt_viewer import QtViewer
    from napari._vispy.canvas import VispyCanvas
    from napari._vispy.layers.base import VispyBaseLayer
    from napari.layers import Image, Layer, Shapes
    from vispy.gloo import Texture2D
    from vispy.scene.visuals import Image as ImageNode

    from napari_wsigpu.display.device_pixels import DevicePixels
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.reading.level import LevelArray


NO_DISPLAY = "there is no display"
DISPLAY_VARIABLES = "DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"


def has_display() -> bool:
    """Whether Qt can open windows; without a display, Qt aborts the process."""
    return not sys.platform.startswith("linux") or any(map(os.environ.get, DISPLAY_VARIABLES))


def unwrapped(owner: Any) -> Any:
    """Return the object behind the proxy that napari hands to the docks of plugins."""
    return getattr(owner, "__wrapped__", owner)


@dataclass(frozen=True)
class Internal:
    """Private attributes of one class or module of napari.

    Attributes
    ----------
    owner : str
        Name of the class or module.
    attributes : tuple of str
        Names of the attributes.
    without : str
        How users notice that an attribute is missing: a clause without a period.
    find : callable
        Returns the owner, given a viewer whose first layer is a multiscale image and whose second
        is a shapes layer. By default, the first layer.
    """

    owner: str
    attributes: tuple[str, ...]
    without: str
    find: Callable[[Any], Any] = lambda viewer: viewer.layers[0]

    @property
    def name(self) -> str:
        """Owner and first attribute, for reports."""
        return f"{self.owner}.{self.attributes[0]}"

    def get(self, owner: object, attribute: str = "") -> Any:
        """Return one of the attributes, by default the first.

        Raises
        ------
        AttributeError
            If this version of napari lacks it.
        """
        return getattr(unwrapped(owner), attribute or self.attributes[0])

    def override(self, owner: object, attribute: str, value: object) -> None:
        """Replace an existing attribute of one object; undo this with `restore`."""
        self.get(owner, attribute)
        setattr(unwrapped(owner), attribute, value)

    def restore(self, owner: object, *attributes: str) -> None:
        """Undo `override` for some attributes of one object, by default for all."""
        for attribute in attributes or self.attributes:
            vars(unwrapped(owner)).pop(attribute, None)


# The comment above each entry states its purpose and, if there is one, a public replacement or the
# change to napari or vispy that would make the entry unnecessary.

LATE_VIEWS = "each new view is drawn one frame late"
SLOW_SHAPES = "layers of thousands of shapes are drawn slowly"
THROUGH_HOST = "pixels that the GPU decodes reach the screen through the host"
ALL_TILES_FIRST = "slides are drawn only once all tiles of a view are decoded"

# Place docks and dialogs, fit slides to a resized window, and detect that the window closes.
# Replacement: the application's only QMainWindow, which `main_window` falls back to.
QT_WINDOW = Internal(
    "Window",
    ("_qt_window",),
    "with several windows, docks don't open automatically, unsaved annotations are discarded "
    "without asking, and the slides of a closed window stay open",
    lambda viewer: viewer.window,
)
# Close windows when Python exits, without saving their size for the next window.
WINDOW_SETTINGS = Internal(
    "_QtMainWindow",
    ("_save_current_window_settings",),
    "a script that ends with an open window changes the size of the next window",
    lambda viewer: QT_WINDOW.get(viewer.window),
)
# Access the canvas, to slice a view before it is drawn and to fill textures on the GPU. napari
# itself could slice before drawing.
QT_VIEWER = Internal(
    "Window",
    ("_qt_viewer",),
    "each new view is drawn one frame late, and pixels reach the screen through the host",
    lambda viewer: viewer.window,
)
# Let scripts find docks that were opened from the menu. Replacement: none; `Window.dock_widgets` is
# read-only.
DOCKS = Internal(
    "Window",
    ("_wrapped_dock_widgets",),
    "a script opens a second dock if the first was opened from the menu",
    lambda viewer: viewer.window,
)
# Wait for all tiles before an exported figure is drawn at another resolution. Replacement:
# `napari_wsigpu.wait`, which only a script can call.
FIGURES = Internal(
    "QtViewer",
    ("resize_canvas",),
    "exported figures may show coarser levels where tiles are not decoded yet",
    lambda viewer: qt_viewer(viewer),
)
# Slice a view before it is drawn, pause decoding on the GPU during a frame, and make the OpenGL
# context current before napari frees a layer's textures. napari itself could slice before drawing.
CANVAS = Internal(
    "VispyCanvas", ("_scene_canvas", "on_draw"), LATE_VIEWS, lambda viewer: qt_viewer(viewer).canvas
)
# Skip napari's second slicing of a frame if the layout has not changed.
CANVAS_LAYOUT = Internal(
    "VispyCanvas",
    ("_needs_overlay_position_update", "_current_viewbox_size"),
    "each view is sliced twice",
    lambda viewer: qt_viewer(viewer).canvas,
)
# Lay out the cells of napari's grid before its first frame, which otherwise shows a few pixels of
# each slide, much enlarged. vispy itself could do so as soon as a grid has a size.
CELLS = Internal(
    "Grid",
    ("_update_child_widget_dim",),
    "the first frame of slides side by side is wrong",
    lambda viewer: qt_viewer(viewer).canvas.grid,
)
# Find the vispy node that draws a layer.
LAYER_NODE = Internal(
    "VispyImageLayer",
    ("_layer_node",),
    THROUGH_HOST,
    lambda viewer: layer_visual(viewer, viewer.layers[0]),
)
# Give a node pixels in GPU memory instead of an array. vispy could accept OpenGL buffers.
IMAGE_NODE = Internal(
    "ImageVisual",
    ("_texture", "_data", "_need_vertex_update", "_need_texture_upload", "set_data"),
    THROUGH_HOST,
    lambda viewer: _image_node(viewer, viewer.layers[0]),
)
# Let vispy choose a texture's format and size, and fill it from GPU memory. vispy could accept
# OpenGL buffers.
TEXTURE = Internal(
    "Texture2D",
    ("_auto_texture_format", "_resize", "_set_data", "scale_and_set_data"),
    THROUGH_HOST,
    lambda viewer: node_texture(_image_node(viewer, viewer.layers[0])),
)
# Access the object that slices a layer. napari plans to slice asynchronously.
SLICING = Internal("Layer", ("_slicing_state",), ALL_TILES_FIRST)
# Answer napari's requests for slices with the tiles decoded so far. napari plans to slice
# asynchronously.
SLICE_REQUESTS = Internal(
    "ScalarFieldSlicingState",
    (
        "_make_slice_request_internal",
        "_make_slice_request",
        "_update_slice_response",
        "_slice_request_class",
    ),
    ALL_TILES_FIRST,
    lambda viewer: SLICING.get(viewer.layers[0]),
)
# Share the coarsest level, which napari keeps in memory for thumbnails.
OVERVIEW = Internal(
    "ScalarFieldBase",
    ("_level_materializer", "_reset_thumbnail_level_data"),
    "the coarsest level of each slide is kept in memory twice",
)
# Redraw a layer's thumbnail once its plane has been read. Replacement:
# `Layer.refresh(thumbnail=True)`, which also slices the layer again.
THUMBNAIL = Internal(
    "Layer", ("_update_thumbnail",), "thumbnails of stacks may show an earlier plane"
)
# Remove passwords and signatures from the URL that napari shows as a layer's source.
# `Layer.source` is read-only.
LAYER_SOURCE = Internal(
    "Layer",
    ("_source",),
    "napari's tooltips show URLs of slides with their passwords and signatures",
)
# List all open viewers. Replacement: `napari.current_viewer`, which `open_viewers` falls back to.
VIEWERS = Internal(
    "Viewer",
    ("_instances",),
    "with several windows, only slides in the active one are drawn progressively",
    lambda viewer: type(unwrapped(viewer)),
)
# Keep notifications within a narrow canvas, and close notifications that appeared while no window
# was active.
NOTIFICATIONS = Internal(
    "NapariQtNotification",
    ("_instances",),
    "notifications may cover the docks, or stay until they are clicked",
    lambda viewer: import_module("napari._qt.dialogs.qt_notification").NapariQtNotification,
)
# Distinguish finished shapes from the one being drawn, and remove shapes drawn by accident.
SHAPE_DRAWING = Internal(
    "Shapes",
    ("_is_creating", "_finish_drawing", "_mode", "_mouse_drag_gen"),
    "undo removes an outline vertex by vertex, and an accidental drag leaves a tiny shape",
    lambda viewer: viewer.layers[1],
)
# Import the module that draws shapes before the first shape is drawn.
SHAPES_VISUAL = Internal(
    "napari._vispy.visuals.shapes",
    ("ShapesVisual",),
    "the first shape appears seconds late",
    lambda viewer: import_module("napari._vispy.visuals.shapes"),
)
# Replace napari's drawing of layers with thousands of shapes, using the triangles that napari
# computed. Drop colors that napari leaves behind.
SHAPES = Internal(
    "Shapes",
    ("_data_view", "_outline_shapes", "_highlight_color", "_highlight_visible"),
    SLOW_SHAPES,
    lambda viewer: viewer.layers[1],
)
SHAPE_LIST = Internal(
    "ShapeList",
    ("_mesh", "_set_color", "_edge_color", "_face_color", "_update_mesh_triangles"),
    SLOW_SHAPES,
    lambda viewer: SHAPES.get(viewer.layers[1]),
)
SHAPES_LAYER = Internal(
    "VispyShapesLayer",
    ("_on_data_change", "_on_matrix_change"),
    SLOW_SHAPES,
    lambda viewer: layer_visual(viewer, viewer.layers[1]),
)
INTERNALS = tuple(each for each in list(globals().values()) if isinstance(each, Internal))


def missing(viewer: Viewer) -> list[Internal]:
    """Return the internals that this version of napari lacks; looks for owners in `viewer`."""
    lacking = []
    for internal in INTERNALS:
        try:
            owner = internal.find(viewer)
            for attribute in internal.attributes:
                internal.get(owner, attribute)
        except (AttributeError, ImportError, KeyError):
            lacking.append(internal)
    return lacking


def probe() -> dict[str, object]:
    """Return what `wsigpu doctor` reports about napari, checked with a hidden viewer."""
    if not has_display():
        return {"reason": NO_DISPLAY}
    viewer = napari.Viewer(show=False)
    viewer.add_image([np.zeros((side, side), np.uint8) for side in (64, 32)], multiscale=True)
    viewer.add_shapes()
    lacking = missing(viewer)
    window = main_window(viewer)
    if window is not None:
        forget_window_settings(window)
    viewer.close()
    return {"version": napari.__version__, "missing": {each.name: each.without for each in lacking}}


# The window


def open_viewers() -> list[Viewer]:
    """Return all open viewers; without `VIEWERS` only the current one."""
    with suppress(AttributeError):
        return list(VIEWERS.get(napari.Viewer))
    current = napari.current_viewer()
    return [] if current is None else [current]


def main_window(viewer: Viewer) -> QMainWindow | None:
    """Return a viewer's window; None if it has none, or it is closed."""
    try:
        window = QT_WINDOW.get(unwrapped(viewer).window)
    except RuntimeError:  # Qt has deleted it
        return None
    except AttributeError:
        # A closed viewer raises the same error, so only the current one may use the fallback.
        if unwrapped(viewer) is not napari.current_viewer():
            return None
        windows = [each for each in QApplication.topLevelWidgets() if isinstance(each, QMainWindow)]
        window = windows[0] if len(windows) == 1 else None
    return window if isinstance(window, QMainWindow) else None


def forget_window_settings(window: QMainWindow) -> None:
    """Keep napari from saving a window's size when it closes."""
    with suppress(AttributeError):
        WINDOW_SETTINGS.override(window, "_save_current_window_settings", lambda: None)


def toasts(window: QMainWindow | None = None) -> list[NapariQtNotification]:
    """Return the notifications of one window or of all; none if napari does not expose them."""
    with suppress(AttributeError, ImportError):
        toast_class = NOTIFICATIONS.find(None)
        listed = NOTIFICATIONS.get(toast_class)
        # napari keeps notifications that were deleted with their window. Closing another one fails
        # in napari 0.10 if the last of the list is such.
        listed[:] = filter(isalive, listed)
        return [*listed] if window is None else window.findChildren(toast_class)
    return []


# The canvas


def qt_viewer(viewer: Viewer) -> QtViewer:
    """Return the widget around the canvas.

    Raises
    ------
    AttributeError
        If this version of napari lacks it.
    """
    return QT_VIEWER.get(unwrapped(viewer).window)


def view_box_size(canvas: VispyCanvas) -> tuple[int, ...] | None:
    """Return the size of a canvas's view boxes; None if it is unknown or about to change."""
    with suppress(AttributeError):
        if not CANVAS_LAYOUT.get(canvas):
            return tuple(CANVAS_LAYOUT.get(canvas, "_current_viewbox_size")) or None
    return None


def lay_out_cells(canvas: VispyCanvas) -> None:
    """Give the cells of a canvas's grid their sizes now instead of while they are drawn."""
    with suppress(AttributeError):
        CELLS.get(canvas.grid)()


# A layer's texture


def layer_visual(viewer: Viewer, layer: Layer) -> VispyBaseLayer:
    """Return the vispy object that draws a layer in a viewer's window.

    Raises
    ------
    AttributeError, KeyError
        If it does not exist, or this version of napari does not expose it.
    """
    return qt_viewer(viewer).canvas.layer_to_visual[layer]


def _image_node(viewer: Viewer, layer: Layer) -> ImageNode:
    return LAYER_NODE.get(layer_visual(viewer, layer))._image_node


def image_node(viewer: Viewer, layer: Layer) -> ImageNode:
    """Return the vispy node that draws a layer, if its texture can be filled on the GPU.

    Raises
    ------
    AttributeError, KeyError, TypeError
        If this version of napari or vispy lacks what `LayerTexture` needs.
    """
    node = _image_node(viewer, layer)
    for attribute in IMAGE_NODE.attributes:
        IMAGE_NODE.get(node, attribute)
    if not TEXTURE.get(node_texture(node), "_auto_texture_format"):
        raise TypeError("its textures have a fixed format")
    return node


def node_texture(node: ImageNode) -> Texture2D:
    """Return the texture of a vispy node."""
    return IMAGE_NODE.get(node, "_texture")


def set_node_data(node: ImageNode, image: DevicePixels) -> None:
    """Do what vispy's `ImageVisual.set_data` does, without converting `image` to an array."""
    if node._data is None or node._data.shape[:2] != image.shape[:2]:
        node._need_vertex_update = True
    node._data = image
    node._need_texture_upload = True
    node.update()


@contextmanager
def only_resized(texture: Texture2D) -> Iterator[None]:
    """Let vispy choose a texture's format, limits and size, but upload nothing."""

    def resize(data: Array, offset: object = None, copy: bool = False) -> None:
        texture._resize(data.shape if data.ndim == 3 else (*data.shape, 1))

    TEXTURE.override(texture, "_set_data", resize)
    try:
        yield
    finally:
        vars(texture).pop("_set_data", None)


# Layers


def coarsest_pixels(layer: Image, levels: Sequence[LevelArray], *, renew: bool) -> Array:
    """Return the coarsest level, from napari's copy for thumbnails if there is one.

    Parameters
    ----------
    layer : Image
        A layer of a slide.
    levels : sequence of LevelArray
        Its levels.
    renew : bool
        Whether the levels differ from the levels that napari copied.
    """
    with suppress(AttributeError):
        if renew:
            OVERVIEW.get(layer, "_reset_thumbnail_level_data")()
        materialize = OVERVIEW.get(layer)
        if materialize is not None:
            pixels: Array = materialize(len(levels) - 1)
            return pixels
    return np.asarray(levels[-1])


def is_being_drawn(layer: Layer) -> bool:
    """Whether the user is drawing a shape in a layer; False if napari does not expose this."""
    with suppress(AttributeError):
        return bool(SHAPE_DRAWING.get(layer))
    return False


def finish_drawing(layer: Layer, mode: str = "") -> None:
    """Finish the shape that the user is drawing in a layer, if there is one.

    With the `mode` in which it is drawn, this works even when the mode has just changed. napari
    would keep the vertex that follows the mouse.
    """
    if is_being_drawn(layer):
        with suppress(AttributeError):
            now = SHAPE_DRAWING.get(layer, "_mode")
            SHAPE_DRAWING.override(layer, "_mode", type(now)(mode or now))
            SHAPE_DRAWING.get(layer, "_finish_drawing")()
            SHAPE_DRAWING.override(layer, "_mode", now)


def end_drag(layer: Layer) -> None:
    """Stop the layer from following the mouse, whose button is still down."""
    with suppress(AttributeError):
        SHAPE_DRAWING.get(layer, "_mouse_drag_gen").clear()


def move_end(layer: Shapes, end: Sequence[float], *, straight: bool) -> None:
    """Move the end of the line that the user is drawing; perhaps in steps of 45 degrees.

    napari ignores movements of a few pixels along an axis, which tilts horizontal and vertical
    lines.
    """
    start, _ = layer.data[-1]
    offset = np.asarray(end, float) - start
    if straight:
        step = np.pi / 4
        angle = round(np.arctan2(*offset[-2:]) / step) * step
        offset[-2:] = np.hypot(*offset[-2:]) * np.array([np.sin(angle), np.cos(angle)])
    edit_shape(layer, len(layer.data) - 1, np.array([start, start + offset]))


def edit_shape(layer: Shapes, index: int, outline: Array) -> None:
    """Change the vertices of a shape; `layer.data` would replace all shapes, which is slow."""
    with suppress(AttributeError):
        SHAPES.get(layer).edit(index, outline)


def drop_leftovers(layer: Shapes) -> None:
    """Drop the features and colors that napari keeps when it removes an outline without area."""
    count = len(layer.data)
    if len(layer.features) > count:
        layer.features = layer.features[:count]
    with suppress(AttributeError):
        shapes = SHAPES.get(layer)
        for name in ("_edge_color", "_face_color"):
            setattr(shapes, name, SHAPE_LIST.get(shapes, name)[:count])
