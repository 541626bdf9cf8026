"""`DevicePixels`: pixels in device memory that are copied to the host when NumPy reads them."""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray


class DevicePixels(NDArrayOperatorsMixin):
    """A read-only array in device memory that behaves like a NumPy array.

    The first use of its values copies all of them to the host; indexing a single pixel copies only
    that pixel.

    Parameters
    ----------
    pixels : device array, shape (height, width) or (height, width, 4)
        The picture; kept as an attribute.
    channels : int
        Number of channels that the array exposes, of up to four in memory.
    fetch : callable
        Copies a device array to the host.
    address : int
        Address of the first pixel; kept as an attribute.
    """

    # NumPy's binary operators defer to this class.
    __array_priority__ = 1000

    def __init__(
        self,
        pixels: DeviceArray,
        channels: int,
        fetch: Callable[[DeviceArray], Array],
        address: int,
    ) -> None:
        self.pixels = pixels
        self.address = address
        self.dtype = np.dtype(pixels.dtype)
        self.shape = pixels.shape if pixels.ndim == 2 else (*pixels.shape[:2], channels)
        self._fetch = fetch
        self._host: Array | None = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of samples."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the samples on the host in bytes."""
        return self.size * int(self.dtype.itemsize)

    @property
    def host(self) -> Array:
        """The pixels as an ndarray, copied to the host once."""
        if self._host is None:
            found = np.asarray(self._fetch(self.pixels))
            self._host = found if found.ndim == 2 else found[..., : self.shape[2]]
        return self._host

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: object) -> AnyArray:
        index = key if isinstance(key, tuple) else (key,)
        # napari reads the pixel under the cursor: copy that one alone.
        if self._host is None and len(index) == 2 and all(isinstance(i, Integral) for i in index):
            sample = np.asarray(self._fetch(self.pixels[int(index[0]), int(index[1])]))
            return sample[: self.shape[2]] if self.ndim == 3 else sample[()]
        return self.host[cast("slice", key)]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False and self._host is None:
            raise ValueError(
                "np.asarray(pixels, copy=False) is not supported: the pixels are on a device."
            )
        return np.array(self.host, dtype=dtype, copy=True if copy else None)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, **named: object
    ) -> AnyArray:
        plain = [i.host if isinstance(i, DevicePixels) else i for i in inputs]
        return getattr(ufunc, method)(*plain, **named)

    def __getattr__(self, name: str) -> AnyArray:
        # Private names are not forwarded: copy and pickle probe them before `_host` exists.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.host, name)
