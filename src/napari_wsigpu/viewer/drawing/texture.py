"""Filling a layer's texture from GPU memory, without a copy through the host."""

from __future__ import annotations

import ctypes
import logging
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import numpy as np
from qtpy import PYSIDE6
from vispy.gloo import get_current_canvas

from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.viewer import napari_internals as internals

if PYSIDE6:
    from qtpy import shiboken

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer
    from napari.layers import Layer
    from vispy.gloo import Texture2D
    from vispy.scene import SceneCanvas
    from vispy.scene.visuals import Image as ImageNode

    from napari_wsigpu.gpu.device.cuda import CudaDevice as Device
    from napari_wsigpu.gpu.device.interop import SharedBuffer
    from napari_wsigpu.model.arrays import Array

ON = "on"
SMALLEST_BUFFER = 16 << 20
MOST_ERRORS = 16

logger = logging.getLogger(__name__)


class LayerTexture:
    """Puts a layer's `DevicePixels` into its texture.

    Parameters
    ----------
    viewer : Viewer
        The viewer that holds the layer.
    layer : Layer
        A layer that shows a slide.
    refused : callable
        Called when the device fails and the layer must be sliced again on the host. Any thread may
        call it, also while the canvas is drawn.

    Attributes
    ----------
    refusal : str or None
        The reason why pictures are copied through the host; None while they are not.
    """

    def __init__(self, viewer: Viewer, layer: Layer, refused: Callable[[], None]) -> None:
        self._viewer, self._layer = ref(viewer), ref(layer)
        self._refused = refused
        self._node: ref[ImageNode] | None = None
        self._device: Device | None = None
        self.refusal: str | None = None

    def follow(self, device: Device) -> bool:
        """Set the device of the pictures; return whether it can fill the texture."""
        self._device = device
        if self.refusal is None and self._node is None:
            try:
                self._attach()
            except (AttributeError, KeyError, TypeError) as error:
                self.refusal = f"textures are not accessible in this version of napari ({error})"
        return self.refusal is None

    def refuse(self, error: Exception) -> None:
        """Draw on the host from now on, and slice the layer again. Any thread may call this."""
        self._record_refusal(error)
        with suppress(RuntimeError):  # at exit, Qt deletes its part of the object first
            self._refused()

    def close(self) -> None:
        """Undo the overrides."""
        node = None if self._node is None else self._node()
        if node is not None:
            internals.IMAGE_NODE.restore(node, "set_data")
            internals.TEXTURE.restore(internals.node_texture(node), "scale_and_set_data")

    def _record_refusal(self, error: Exception) -> None:
        if self.refusal is None:
            self.refusal = str(error).removesuffix(".") or type(error).__name__
            logger.info("Pictures are copied through the host: %s", error)

    def _attach(self) -> None:
        viewer, layer = self._viewer(), self._layer()
        if viewer is None or layer is None:
            raise KeyError("the viewer or its layer was closed")
        node = internals.image_node(viewer, layer)
        self._node = ref(node)
        internals.IMAGE_NODE.override(node, "set_data", self._set_data)
        internals.TEXTURE.override(
            internals.node_texture(node), "scale_and_set_data", self._scale_and_set_data
        )

    def _set_data(self, image: Array | DevicePixels, copy: bool = False) -> None:
        """Override vispy's `ImageVisual.set_data`, which would copy the pixels to the host."""
        assert self._node is not None
        node = self._node()
        if not isinstance(image, DevicePixels):
            assert node is not None
            type(node).set_data(node, image, copy)
            return
        internals.set_node_data(node, image)

    def _scale_and_set_data(
        self, data: Array | DevicePixels, offset: object = None, copy: bool = False
    ) -> None:
        """Fill the texture; called while the canvas is drawn."""
        assert self._node is not None
        node = self._node()
        texture = internals.node_texture(node)
        if isinstance(data, DevicePixels):
            if self.refusal is None:
                try:
                    self._fill(texture, data)
                    return
                except Exception as error:  # OpenGL and CUDA raise many types; the host can draw
                    self._record_refusal(error)
            try:
                data = data.host
            except Exception as error:
                # The device failed, and its pixels are lost: slice again on the host.
                self.refuse(error)
                return
        type(texture).scale_and_set_data(texture, data, offset=offset, copy=copy)

    def _fill(self, texture: Texture2D, data: DevicePixels) -> None:
        assert self._device is not None
        canvas = get_current_canvas()
        if canvas is None:
            raise DeviceError("No canvas is being drawn.")
        with internals.only_resized(texture):
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


class _UnpackBuffer:
    """A pixel buffer of one OpenGL context: CUDA writes to it, and textures are filled from it.

    It lives as long as the window. Contexts share their objects, so a buffer that is not deleted
    would stay until the process ends.
    """

    def __init__(self, canvas: SceneCanvas) -> None:
        self._canvas = ref(canvas)
        self._context = canvas.native.context()
        self._pointer = shiboken.getCppPointer(self._context)[0] if PYSIDE6 else 0
        self._name = 0
        self._shared: SharedBuffer | None = None
        self._device: Device | None = None
        self._refusals: dict[str, str] = {}
        self._context.aboutToBeDestroyed.connect(self._on_destroyed)

    def fill(self, texture: int, data: DevicePixels, device: Device) -> None:
        """Copy pixels to a texture; the context must be current."""
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
        shared = self._buffer_for(device, pixels.nbytes)
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

    def _buffer_for(self, device: Device, size: int) -> SharedBuffer:
        if device.name in self._refusals:
            raise DeviceError(self._refusals[device.name])
        if self._shared is None or self._shared.size < size or self._device is not device:
            self._release()
            room = max(SMALLEST_BUFFER, size + size // 4)
            self._name = _new_buffer(room)
            try:
                self._shared, self._device = device.share_buffer(self._name, room), device
            except Exception as error:  # drivers and bindings raise many types
                self._release()
                self._refusals[device.name] = str(error)
                raise
        return self._shared

    def _on_destroyed(self) -> None:
        """Release CUDA's registration, then the buffer, before the context is destroyed."""
        from qtpy.QtGui import QOffscreenSurface, QOpenGLContext

        # PySide6 has invalidated its wrapper of the context; Qt's own object still exists.
        context = shiboken.wrapInstance(self._pointer, QOpenGLContext) if PYSIDE6 else self._context
        # The window's surface is already gone, but a context needs one to become current.
        surface = QOffscreenSurface()
        surface.setFormat(context.format())
        surface.create()
        if context.makeCurrent(surface):
            self._release()
            context.doneCurrent()
        _buffers.pop(self._canvas(), None)

    def _release(self) -> None:
        from OpenGL import GL

        shared, self._shared = self._shared, None
        name, self._name = self._name, 0
        if shared is not None:
            with suppress(DeviceError):  # the CUDA context is lost, and the registration with it
                shared.close()
        if name:
            with suppress(GL.GLError):
                GL.glDeleteBuffers(1, [name])


_buffers: WeakKeyDictionary[SceneCanvas, _UnpackBuffer] = WeakKeyDictionary()


def _new_buffer(size: int) -> int:
    from OpenGL import GL

    name = int(GL.glGenBuffers(1))
    GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, name)
    GL.glBufferData(GL.GL_PIXEL_UNPACK_BUFFER, size, None, GL.GL_STREAM_DRAW)
    GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, 0)
    return name


def probe() -> dict[str, str]:
    """Return the OpenGL renderer, and the reason if the first CUDA device cannot fill textures."""
    from OpenGL import GL
    from qtpy.QtGui import QGuiApplication, QOffscreenSurface, QOpenGLContext

    from napari_wsigpu.gpu.device.cuda import CudaDevice

    if not internals.has_display():
        return {"reason": internals.NO_DISPLAY}
    application = QGuiApplication.instance() or QGuiApplication([])
    surface, context = QOffscreenSurface(), QOpenGLContext()
    surface.create()
    if not (context.create() and context.makeCurrent(surface)):
        return {"reason": f"no OpenGL context on Qt's platform '{application.platformName()}'"}
    found = {"version": GL.glGetString(GL.GL_RENDERER).decode(errors="replace")}
    try:
        CudaDevice(0).share_buffer(_new_buffer(SMALLEST_BUFFER), SMALLEST_BUFFER).close()
    except DeviceError as error:
        found["reason"] = str(error).removesuffix(".")
    return found
