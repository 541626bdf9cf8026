"""The private data of a slide that the user has chosen to see."""

from __future__ import annotations

from dataclasses import dataclass, field

from napari_wsigpu.model.privacy import PRIVATE_IMAGES


@dataclass
class Disclosure:
    """The private data of one slide that may be shown.

    Attributes
    ----------
    fields : bool
        Whether private fields of the metadata may be shown.
    images : set of str
        Names of private associated images that may be shown, in lower case.
    """

    fields: bool = False
    images: set[str] = field(default_factory=set)

    def hides(self, image: str) -> bool:
        """Whether an associated image must be neither decoded nor shown."""
        name = image.casefold()
        return name in PRIVATE_IMAGES and name not in self.images


def by_default(*, show_private: bool) -> Disclosure:
    """Return the initial disclosure of a slide, from the user's settings."""
    return Disclosure(show_private, set(PRIVATE_IMAGES) if show_private else set())
