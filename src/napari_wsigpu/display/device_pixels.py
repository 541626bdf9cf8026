"""`DevicePixels`: pixels in device memory that NumPy's users get when they ask for them."""

from __future__ import annotations

import math
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray


class DevicePixels(NDArrayOperatorsMixin):
    """An array in device memory, which looks like one of NumPy and is copied when it is used.

    Parameters
    ----------
    pixels : device array, shape (height, width) or (height, width, 4)
        A picture; kept as an attribute.
    channels : int
        How many of four channels the array has.
    fetch : callable
        Copies a device array to the host.
    address : int
        Where the picture begins; kept as an attribute.
    """

    __array_priority__ = 1000

    def __init__(
        self,
        pixels: Any,
        channels: int,
        fetch: Callable[[Any], NDArray[Any]],
        address: int,
    ) -> None:
        self.pixels = pixels
        self.address = address
        self.dtype = np.dtype(pixels.dtype)
        self.shape = pixels.shape if pixels.ndim == 2 else (*pixels.shape[:2], channels)
        self._fetch = fetch
        self._host: NDArray[Any] | None = None

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many samples it has."""
        size: int = math.prod(self.shape)
        return size

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the host."""
        return self.size * int(self.dtype.itemsize)

    @property
    def host(self) -> NDArray[Any]:
        """A copy on the host, made once."""
        if self._host is None:
            found = np.asarray(self._fetch(self.pixels))
            self._host = found if found.ndim == 2 else found[..., : self.shape[2]]
        return self._host

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> Any:
        index = key if isinstance(key, tuple) else (key,)
        if self._host is None and len(index) == 2 and all(isinstance(i, Integral) for i in index):
            sample = np.asarray(self._fetch(self.pixels[int(index[0]), int(index[1])]))
            return sample[: self.shape[2]] if self.ndim == 3 else sample[()]
        return self.host[key]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False and self._host is None:
            raise ValueError("pixels of a device can't be had without a copy")
        return np.array(self.host, dtype=dtype, copy=True if copy else None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        plain = [i.host if isinstance(i, DevicePixels) else i for i in inputs]
        return getattr(ufunc, method)(*plain, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.host, name)
