"""Type aliases for arrays of samples, indices and flags."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import cupy

# The sample type is declared in the file, so it is unknown until the file is opened.
Array = NDArray[Any]
DType = np.dtype[Any]
ByteArray = NDArray[np.uint8]
Indices = NDArray[np.intp]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Records = NDArray[np.void]
DeviceArray: TypeAlias = "cupy.ndarray"
AnyArray: TypeAlias = "Array | cupy.ndarray"
