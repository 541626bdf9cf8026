"""`Opening`: how a slide was opened, and can be opened again."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from napari_wsigpu.formats.describe import described
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.model.errors import UnsupportedSlideError, changed_error
from napari_wsigpu.model.layout import DIGEST, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.storage.source import ByteSource
    from napari_wsigpu.storage.stream import StreamSource


# Folders below the slide's own in which its files lie.
DEEPEST = 2


@dataclass(frozen=True, eq=False)
class Opening:
    """How a slide was opened: enough to open it again after a fork or in another process.

    Attributes
    ----------
    layout : SlideLayout
        The slide. The path of a label image is its title: see `label_image`.
    device, threads
        As in `open_slide`.
    keeps_whole : bool
        Whether caches keep tiles that one region takes whole.
    color : {"stored", "srgb"}
        The slide's `display_color`.
    stream : StreamSource or None
        What it is read from, if it was not opened by a path.
    label : tuple of (Opening, int) or None
        The slide that it is a label image of, and its number there.
    """

    layout: SlideLayout
    device: str = "auto"
    threads: int | None = None
    keeps_whole: bool = True
    color: Color = "stored"
    stream: StreamSource | None = None
    label: tuple[Opening, int] | None = None

    def label_image(self, number: int) -> Opening:
        """Return how a label image is opened.

        Its path can name a patient, so that a title takes the place of it. Its layout still has
        the paths of its files, and does not travel.
        """
        title = f"{self.layout.path} (label image {number + 1})"
        layout = replace(self.layout.labels[number].layout, path=title)
        label = self, number
        return replace(self, layout=layout, device="cpu", color="stored", label=label)

    @contextmanager
    def described(
        self, z: int | None = None, t: int | None = None
    ) -> Iterator[tuple[Opening, ByteSource | None]]:
        """Describe the file again; a plane other than its own if one is given.

        Yields
        ------
        Opening
            This one, with the layout of that plane and all that `portable` leaves out.
        ByteSource or None
            As of `formats.describe.described`.

        Raises
        ------
        SlideChangedError
            If the file is no longer the one that was opened.
        SlideError
            If it can't be read.
        """
        own = self.layout
        shown, remote = own.planes, own.remote
        if self.label is not None:
            parent, number = self.label
            whole = parent.layout.planes  # of which the label image may show each for several
            if z is not None:
                z = -(-z * whole.size_z // shown.size_z)
            if t is not None:
                t = -(-t * whole.size_t // shown.size_t)
            with parent.described(z, t) as (found, source):
                if number >= len(found.layout.labels):
                    raise changed_error(own.path)
                image = found.label_image(number)
                yield replace(self, layout=image.layout, label=image.label), source
            return
        if self.stream is not None:
            raise self._stream_error()
        address = own.path if remote is None else remote.url
        at = {"z": shown.z if z is None else z, "t": shown.t if t is None else t}
        with described(address, at if shown.names else None) as (layout, source):
            now, known = layout.without_words(), own.without_words()
            if now.files != known.files or layout.remote != remote:
                raise changed_error(own.path)
            yield replace(self, layout=layout), source

    def portable(self) -> Opening:
        """Return what travels to another process: nothing that can name a patient.

        Raises
        ------
        UnsupportedSlideError
            If another process can't open the slide.
        """
        if self.label is not None:
            parent = self.label[0].portable()
            return replace(self, layout=parent.layout, label=(parent, self.label[1]))
        if self.stream is not None:
            raise self._stream_error()
        return replace(self, layout=self.layout.without_words())

    def with_files(self) -> Opening:
        """Return it with the paths of the slide's other files, which don't travel.

        They are looked for beside the slide and below, where all formats have them.

        Raises
        ------
        SlideChangedError
            If one is not there any more.
        """
        layout = self.layout
        missing = {file.path for file in layout.files if file.path.startswith(DIGEST)}
        if not missing:
            return self
        own = Path(layout.path)
        root = own if own.is_dir() else own.parent
        found: dict[str, str] = {}
        for folder, below, names in os.walk(root):
            # Such a folder has the slide's name in its own; others may be large.
            below.sort(key=lambda name: own.stem not in name)
            if len(Path(folder).relative_to(root).parts) == DEEPEST:
                below.clear()
            paths = (os.path.join(folder, name) for name in names)  # noqa: PTH118 - many
            found |= {key: path for path in paths if (key := digest(path)) in missing}
            if len(found) == len(missing):
                files = (replace(f, path=found.get(f.path, f.path)) for f in layout.files)
                return replace(self, layout=replace(layout, files=tuple(files)))
        raise changed_error(layout.path)

    def in_child(self) -> Opening:
        """Return how a forked process opens the slide: by the CPU if its parent uses a GPU."""
        if self.device in ("auto", "cpu") or not driver.started_before_fork():
            return self
        driver.warn_of_fork()
        return replace(self, device="cpu")

    def _stream_error(self) -> UnsupportedSlideError:
        return UnsupportedSlideError(
            f"'{self.layout.path}' was opened from a stream, which can't be opened again for "
            "another process or plane; open the slide by its path."
        )
