"""Commands that choose a tool of the "Annotate" dock; `napari.yaml` binds them to keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Needed at run time: napari passes the viewer to parameters of this type.
from napari import Viewer  # noqa: TC002

from napari_wsigpu.viewer.window.docks import open_dock
from napari_wsigpu.widgets.annotations.annotation_dock import SELECT, Annotations

if TYPE_CHECKING:
    from collections.abc import Callable


def _chooser(tool: str) -> Callable[[Viewer], None]:
    def draw(viewer: Viewer) -> None:
        dock = open_dock(viewer, Annotations.title_in_tabs)
        if isinstance(dock, Annotations):
            dock.draw(tool)

    return draw


select_objects, draw_rectangle, draw_outline, draw_line, draw_point = map(
    _chooser, (SELECT, "Rectangle", "Outline", "Line", "Point")
)
