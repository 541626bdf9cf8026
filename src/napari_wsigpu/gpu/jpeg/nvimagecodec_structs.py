"""Structures of nvImageCodec's C library; members are in the order of ``nvimgcodec.h``."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_size_t, c_uint8, c_uint32, c_void_p
from typing import ClassVar

MOST_PLANES = 32


class Structure(ctypes.Structure):
    """Base of the library's structures, which all start with their own type and size."""

    type_: ClassVar[int]
    head: ClassVar[list[tuple[str, type]]] = [
        ("struct_type", c_int),
        ("struct_size", c_size_t),
        ("struct_next", c_void_p),
    ]

    def __init__(self, **values: object) -> None:
        super().__init__(struct_type=self.type_, struct_size=ctypes.sizeof(self), **values)


class Properties(Structure):
    """``nvimgcodecProperties_t``."""

    type_ = 1
    _fields_ = [*Structure.head, ("version", c_uint32), ("cudart_version", c_uint32)]


class InstanceInfo(Structure):
    """``nvimgcodecInstanceCreateInfo_t``."""

    type_ = 2
    _fields_ = [
        *Structure.head,
        ("load_builtin_modules", c_int),
        ("load_extension_modules", c_int),
        ("extension_modules_path", c_char_p),
        ("create_debug_messenger", c_int),
        ("debug_messenger_desc", c_void_p),
        ("message_severity", c_uint32),
        ("message_category", c_uint32),
    ]


class DecodeParams(Structure):
    """``nvimgcodecDecodeParams_t``."""

    type_ = 5
    _fields_ = [*Structure.head, ("apply_exif_orientation", c_int)]


class Orientation(Structure):
    """``nvimgcodecOrientation_t``."""

    type_ = 7
    _fields_ = [*Structure.head, ("rotated", c_int), ("flip_x", c_int), ("flip_y", c_int)]


class Plane(Structure):
    """``nvimgcodecImagePlaneInfo_t``."""

    type_ = 12
    _fields_ = [
        *Structure.head,
        ("width", c_uint32),
        ("height", c_uint32),
        ("row_stride", c_size_t),
        ("num_channels", c_uint32),
        ("sample_type", c_int),
        ("precision", c_uint8),
    ]


class ImageInfo(Structure):
    """``nvimgcodecImageInfo_t``."""

    type_ = 11
    _fields_ = [
        *Structure.head,
        ("codec_name", ctypes.c_char * 256),
        ("color_spec", c_int),
        ("chroma_subsampling", c_int),
        ("sample_format", c_int),
        ("orientation", Orientation),
        ("num_planes", c_uint32),
        ("plane_info", Plane * MOST_PLANES),
        ("buffer", c_void_p),
        ("buffer_kind", c_int),
        ("cuda_stream", c_void_p),
    ]


class BackendParams(Structure):
    """``nvimgcodecBackendParams_t``."""

    type_ = 29
    _fields_ = [*Structure.head, ("load_hint", c_float), ("load_hint_policy", c_int)]


class Backend(Structure):
    """``nvimgcodecBackend_t``."""

    type_ = 17
    _fields_ = [*Structure.head, ("kind", c_int), ("params", BackendParams)]


class ExecutionParams(Structure):
    """``nvimgcodecExecutionParams_t``."""

    type_ = 30
    _fields_ = [
        *Structure.head,
        ("device_allocator", c_void_p),
        ("pinned_allocator", c_void_p),
        ("max_num_cpu_threads", c_int),
        ("executor", c_void_p),
        ("device_id", c_int),
        ("pre_init", c_int),
        ("skip_pre_sync", c_int),
        ("num_backends", c_int),
        ("backends", ctypes.POINTER(Backend)),
    ]
