"""Pictures in a GPU's memory become a layer's texture, without visiting the host.

It touches what napari and vispy keep to themselves: a layer's node, and the texture of that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from vispy.gloo import get_current_canvas

from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.gpu.device.cuda import CudaDevice as Device
    from napari_wsigpu.gpu.device.interop import SharedBuffer

ON = "on"
SMALLEST_BUFFER = 16 << 20
MOST_ERRORS = 16

logger = logging.getLogger(__name__)


class LayerTexture:
    """What puts a layer's `DevicePixels` into its texture.

    Parameters
    ----------
    viewer : Viewer
        Where the layer is.
    layer : Layer
        One that shows a slide.
    refused : callable
        Called when pictures are lost, perhaps while the canvas is drawn.
    """

    def __init__(self, viewer: Viewer, layer: Layer, refused: Callable[[], None]) -> None:
        self._viewer, self._layer = ref(viewer), ref(layer)
        self._refused = refused
        self._node: ref[Any] | None = None
        self._device: Device | None = None
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why pictures go by way of the host from now on; None if they need not."""
        return self._refusal

    def follow(self, device: Device) -> bool:
        """Have pictures of a device taken; return whether that works, as far as is known."""
        self._device = device
        if self._refusal is None and self._node is None:
            try:
                self._attach()
            except (AttributeError, KeyError, TypeError) as error:
                self._refusal = f"this version of napari keeps textures elsewhere ({error})"
        return self._refusal is None

    def refuse(self, error: Exception) -> None:
        """Have pictures drawn on the host from now on, and the layer sliced anew; in any thread."""
        self._note(error)
        with suppress(RuntimeError):  # the application ends, and Qt's part is gone already
            self._refused()

    def close(self) -> None:
        """Give napari its own way back."""
        node = None if self._node is None else self._node()
        if node is not None:
            vars(node).pop("set_data", None)
            vars(node._texture).pop("scale_and_set_data", None)

    def _note(self, error: Exception) -> None:
        if self._refusal is None:
            self._refusal = str(error).removesuffix(".") or type(error).__name__
            logger.info("Pictures go by way of the host: %s", error)

    def _attach(self) -> None:
        viewer, layer = self._viewer(), self._layer()
        if viewer is None or layer is None:
            raise KeyError("the viewer")
        node = viewer.window._qt_viewer.canvas.layer_to_visual[layer]._layer_node._image_node
        if not node._texture._auto_texture_format:
            raise TypeError("its textures have a fixed format")
        self._node = ref(node)
        node.set_data = self._set_data
        node._texture.scale_and_set_data = self._scale_and_set_data

    def _set_data(self, image: Any, copy: bool = False) -> None:
        """Do as vispy's image visual does, without making an array of device pixels."""
        node: Any = None if self._node is None else self._node()
        if not isinstance(image, DevicePixels):
            type(node).set_data(node, image, copy)
            return
        if node._data is None or node._data.shape[:2] != image.shape[:2]:
            node._need_vertex_update = True
        node._data = image
        node._need_texture_upload = True
        node.update()

    def _scale_and_set_data(self, data: Any, offset: Any = None, copy: bool = False) -> None:
        """Fill the texture; called while the canvas is drawn."""
        node: Any = None if self._node is None else self._node()
        texture = node._texture
        if isinstance(data, DevicePixels):
            if self._refusal is None:
                try:
                    self._fill(texture, data)
                    return
                except Exception as error:  # whatever OpenGL or CUDA says, the host can do it
                    self._note(error)
            try:
                data = data.host
            except Exception as error:  # the device is lost, and what it had; the host draws anew
                self.refuse(error)
                return
        type(texture).scale_and_set_data(texture, data, offset=offset, copy=copy)

    def _fill(self, texture: Any, data: DevicePixels) -> None:
        assert self._device is not None
        canvas = get_current_canvas()
        if canvas is None:
            raise DeviceError("Nothing is drawn just now.")
        with _only_resized(texture):
            shape = data.pixels.shape
            stand_in = np.broadcast_to(np.zeros((), data.dtype), shape)
            type(texture).scale_and_set_data(texture, stand_in)
        context = canvas.context
        context.glir.associate(texture.glir)
        context.flush_commands()
        handle = context.shared.parser.get_object(texture.id).handle
        if canvas not in _buffers:
            _buffers[canvas] = _UnpackBuffer(canvas)
        _buffers[canvas].fill(handle, data, self._device)


@contextmanager
def _only_resized(texture: Any) -> Iterator[None]:
    """Let vispy choose format, limits and size of a texture, but upload nothing."""

    def resize(data: Any, offset: Any = None, copy: bool = False) -> None:
        texture._resize(data.shape if data.ndim == 3 else (*data.shape, 1))

    vars(texture)["_set_data"] = resize
    try:
        yield
    finally:
        del vars(texture)["_set_data"]


class _UnpackBuffer:
    """One OpenGL context's buffer that CUDA writes to, and textures are filled from.

    It lives as long as the window, whose context shares its objects with those of other windows:
    what is not deleted stays until the process ends.
    """

    def __init__(self, canvas: Any) -> None:
        self._canvas = ref(canvas)
        self._context = canvas.native.context()
        self._name = 0
        self._shared: SharedBuffer | None = None
        self._device: Device | None = None
        self._refusals: dict[str, str] = {}
        self._context.aboutToBeDestroyed.connect(self._end)

    def fill(self, texture: int, data: DevicePixels, device: Device) -> None:
        """Copy pixels to a texture; the context is current."""
        from OpenGL import GL
        from OpenGL.raw.GL.VERSION.GL_1_1 import glTexSubImage2D

        for _ in range(MOST_ERRORS):
            if GL.glGetError() == GL.GL_NO_ERROR:
                break
        pixels = data.pixels
        height, width = pixels.shape[:2]
        types = {"uint8": GL.GL_UNSIGNED_BYTE, "uint16": GL.GL_UNSIGNED_SHORT}
        kind = types.get(data.dtype.name, GL.GL_FLOAT)
        pixel_format = GL.GL_RED if pixels.ndim == 2 else GL.GL_RGBA
        shared = self._of(device, pixels.nbytes)
        shared.write(data.address, pixels.nbytes)
        GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, self._name)
        try:
            GL.glBindTexture(GL.GL_TEXTURE_2D, texture)
            GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 1)
            glTexSubImage2D(
                GL.GL_TEXTURE_2D, 0, 0, 0, width, height, pixel_format, kind, ctypes.c_void_p(0)
            )
        finally:
            GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 4)
            GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, 0)

    def _of(self, device: Device, size: int) -> SharedBuffer:
        if device.name in self._refusals:
            raise DeviceError(self._refusals[device.name])
        if self._shared is None or self._shared.size < size or self._device is not device:
            self._release()
            room = max(SMALLEST_BUFFER, size + size // 4)
            self._name = _new_buffer(room)
            try:
                self._shared, self._device = device.share_buffer(self._name, room), device
            except Exception as error:  # whatever a driver or its bindings say
                self._release()
                self._refusals[device.name] = str(error)
                raise
        return self._shared

    def _end(self) -> None:
        """Let go of all before the context goes: CUDA first."""
        from qtpy.QtGui import QOffscreenSurface

        # The window is gone already, and a context is current on some surface only.
        surface = QOffscreenSurface()
        surface.setFormat(self._context.format())
        surface.create()
        if self._context.makeCurrent(surface):
            self._release()
            self._context.doneCurrent()
        _buffers.pop(self._canvas(), None)

    def _release(self) -> None:
        from OpenGL import GL

        shared, self._shared = self._shared, None
        name, self._name = self._name, 0
        if shared is not None:
            with suppress(DeviceError):  # the context is lost, and all in it
                shared.close()
        if name:
            with suppress(GL.GLError):
                GL.glDeleteBuffers(1, [name])


_buffers: WeakKeyDictionary[Any, _UnpackBuffer] = WeakKeyDictionary()


def _new_buffer(size: int) -> int:
    from OpenGL import GL

    name = int(GL.glGenBuffers(1))
    GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, name)
    GL.glBufferData(GL.GL_PIXEL_UNPACK_BUFFER, size, None, GL.GL_STREAM_DRAW)
    GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, 0)
    return name


def probe() -> dict[str, Any]:
    """Find what draws windows here, and whether the first CUDA device can fill its textures."""
    from OpenGL import GL
    from qtpy.QtGui import QGuiApplication, QOffscreenSurface, QOpenGLContext

    from napari_wsigpu.gpu.device.cuda import CudaDevice

    places = "DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"
    if sys.platform.startswith("linux") and not any(map(os.environ.get, places)):
        return {"reason": "there is no display"}
    application = QGuiApplication.instance() or QGuiApplication([])
    surface, context = QOffscreenSurface(), QOpenGLContext()
    surface.create()
    if not (context.create() and context.makeCurrent(surface)):
        return {"reason": f"OpenGL does not start on '{application.platformName()}'"}
    found = {"version": GL.glGetString(GL.GL_RENDERER).decode(errors="replace")}
    try:
        CudaDevice(0).share_buffer(_new_buffer(SMALLEST_BUFFER), SMALLEST_BUFFER).close()
    except DeviceError as error:
        found["reason"] = str(error).removesuffix(".")
    return found
