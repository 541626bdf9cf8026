"""Our reading and writing through kvikio, with GPUDirect Storage and without, side by side.

kvikio takes its mode from the environment when it is imported, so each mode has a process.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from benchmarks.transfers import reading
from benchmarks.transfers.readers import OURS
from benchmarks.transfers.timing import Absent, Way
from napari_wsigpu.cli.probes import probe_kvikio
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

DIRECT = f"{OURS}, kvikio, GDS on"
MODES = {
    DIRECT: {"WSIGPU_GDS": "kvikio", "KVIKIO_COMPAT_MODE": "OFF"},
    f"{OURS}, kvikio, GDS off": {"WSIGPU_GDS": "kvikio", "KVIKIO_COMPAT_MODE": "ON"},
}


class KvikioProcess:
    """A process in which kvikio works in one mode.

    Parameters
    ----------
    mode : Mapping of str to str
        Its environment.
    """

    def __init__(self, mode: Mapping[str, str]) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (mode,))

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Run a function of a module there; a DeviceError says that the process is gone."""
        try:
            return self._pool.submit(function, *given).result()
        except BrokenProcessPool as error:
            raise DeviceError("The process that uses kvikio ended by itself.") from error

    def close(self) -> None:
        """End the process."""
        with suppress(DeviceError):
            self.call(reading.close)
        self._pool.shutdown()


class KvikioModes:
    """A process for each mode of kvikio, or why there is none.

    Parameters
    ----------
    no_gpu : str
        Why there is no device; empty if there is one.
    stack : ExitStack
        Ends the processes.
    """

    def __init__(self, no_gpu: str, stack: ExitStack) -> None:
        self._found: dict[str, KvikioProcess | str] = {}
        for name, mode in MODES.items():
            self._found[name] = no_gpu or _absence()
            if not self._found[name]:
                process = KvikioProcess(mode)
                stack.callback(process.close)
                self._found[name] = process.call(_refusal, name == DIRECT) or process

    def ways(
        self,
        function: Callable[..., Any],
        given: Callable[[Any], tuple[Any, ...]],
        against: str = "",
    ) -> list[Way | Absent]:
        """Return a way for each mode.

        Parameters
        ----------
        function : callable
            A function of a module: with True first it returns pixels, with False seconds.
        given : callable
            Makes its further arguments of an item.
        against : str
            Why the work doesn't suit kvikio; empty if it does.
        """
        return [
            Absent(name, found)
            if isinstance(found, str)
            else Absent(name, against)
            if against
            else _way(name, found, function, given)
            for name, found in self._found.items()
        ]


def _way(
    name: str,
    process: KvikioProcess,
    function: Callable[..., Any],
    given: Callable[[Any], tuple[Any, ...]],
) -> Way:
    return Way(
        name,
        lambda item: process.call(function, False, *given(item)),
        lambda item: process.call(function, True, *given(item)),
    )


def _start(mode: Mapping[str, str]) -> None:
    os.environ.update(mode)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the process ends it


def _absence() -> str:
    if find_spec("kvikio") is None:
        return "kvikio is not installed (pip install kvikio-cu12, or -cu13)"
    return ""


def _refusal(direct: bool) -> str:
    try:
        found = probe_kvikio()
    except Exception as error:  # whatever kvikio raises where it can't work
        return f"kvikio can't be used ({' '.join(str(error).split())})"
    if direct and "GDS" not in found["works"]:
        return f"kvikio has no GPUDirect Storage ({found['note']})"
    return ""
