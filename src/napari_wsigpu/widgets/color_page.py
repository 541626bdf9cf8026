"""The inspector's page "Color": the ICC profile, and whether it is applied."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

from magicgui.widgets import CheckBox
from PIL import ImageCms

from napari_wsigpu.codecs.color import profile_size
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.widgets.kit.parts import Panel, Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.jobs import Jobs

MARGIN = 9  # pixels
NO_PROFILE = "The file holds no ICC profile: its colors are shown as they are stored."
EXPLANATION = (
    "The profile says which colors the scanner's numbers stand for. With it, the slide is shown "
    "in sRGB; scripts still read what is stored."
)


class ColorPage(Panel):
    """Says what ICC profile there is, and applies it.

    Parameters
    ----------
    jobs : Jobs
        The dock's slow work.
    recolored : callable
        Called when the slide is shown in other colors from now on.
    """

    def __init__(self, jobs: Jobs, recolored: Callable[[], object]) -> None:
        self._jobs, self._recolored = jobs, recolored
        self._slide: Slide | None = None
        self._unread = False
        self.profile = Text("ICC profile")
        self.apply = CheckBox(text="&Apply ICC profile", tooltip="Show the slide in sRGB")
        self.explanation = Text("", EXPLANATION)
        super().__init__(self.profile, self.apply, self.explanation, margin=MARGIN)
        self.stretch()
        self.apply.native.setAccessibleName("Apply ICC profile")
        self.apply.native.toggled.connect(self._apply)

    def show_slide(self, slide: Slide | None) -> None:
        """Show the profile of another slide, or none."""
        self._jobs.drop(self)
        self._slide = slide
        place = None if slide is None else slide.layout.icc
        self._unread = place is not None
        self.explanation.visible = place is not None
        self.profile.value = (
            NO_PROFILE if place is None else f"ICC profile of {byte_size(profile_size(place))}"
        )
        self._check()
        if self.visible:
            self.on_shown(None)

    def on_shown(self, event: Any) -> None:
        """Read the profile's description, now that it is looked at."""
        slide = self._slide
        if slide is None or not self._unread:
            return
        self._unread = False
        work = lambda: describe_profile(slide)  # noqa: E731
        self._jobs.start("Reading the ICC profile", slide, work, self.profile.say, owner=self)

    def _check(self) -> None:
        """Let the check box say in which colors the slide is shown."""
        self.apply.enabled = self._slide is not None and self._slide.layout.icc is not None
        self.apply.native.blockSignals(True)
        self.apply.value = self._slide is not None and self._slide.display_color == "srgb"
        self.apply.native.blockSignals(False)

    def _apply(self, applied: bool) -> None:
        slide = self._slide
        if slide is None:
            return
        color: Literal["stored", "srgb"] = "srgb" if applied else "stored"
        self.apply.enabled = False
        self._jobs.start(
            "Applying the ICC profile",
            slide,
            lambda: slide.read_region((0, 0), (1, 1), slide.level_count - 1, color=color),
            lambda _: self._show_color(slide, color),
            self._fail,
            owner=self,
        )

    def _show_color(self, slide: Slide, color: Literal["stored", "srgb"]) -> None:
        slide.display_color = color
        self._check()
        self._recolored()

    def _fail(self, sentence: str) -> None:
        self.profile.say(sentence)
        self._check()


def describe_profile(slide: Slide) -> str:
    """Return the description that a slide's ICC profile gives of itself, or why there is none."""
    try:
        profile = slide.icc_profile or b""
        text = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except SlideError as error:
        return str(error)
    except (OSError, ImageCms.PyCMSError) as error:
        return (
            f"The ICC profile of '{slide.path}' is damaged ({error}); its colors are shown as "
            "they are stored."
        )
    name = " ".join(text.split())[:200] or "without a description"
    return f"ICC profile: {name} ({byte_size(len(profile))})"
