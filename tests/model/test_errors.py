"""Error messages in notifications."""

import pytest

from napari_wsigpu.model.errors import NotASlideError, SlideError, shortened


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("'/data/a b/x.svs' is no slide.", "'x.svs' is no slide."),
        ("'C:\\\\data\\\\x.svs' is no slide.", "'x.svs' is no slide."),
        ("'https://host/a/x.svs' is gone.", "'x.svs' is gone."),
        ("A tile of '/a/x.svs' is bad; see '/b/y'.", "A tile of 'x.svs' is bad; see 'y'."),
        ("It can't be; the file's end isn't there.", "It can't be; the file's end isn't there."),
        ("'jpeg' or 'raw', but not 'a/b'.", "'jpeg' or 'raw', but not 'a/b'."),
    ],
)
def test_messages_have_names_instead_of_paths(sentence, message):
    assert SlideError(sentence).message == message
    assert NotASlideError(sentence).message == message
    assert str(SlideError(sentence)) == sentence


def test_only_instances_have_messages():
    """PyTorch recreates errors as ``kind(message=...)`` if the class has that attribute."""
    assert not hasattr(SlideError, "message")
    assert not hasattr(NotASlideError, "message")


def test_long_reasons_end_between_two_words():
    reason = "number of frames 2147483647 for tiles " * 10
    found = shortened(reason)
    assert len(found) <= 200
    assert found.endswith(" ...")
    assert f"{found.removesuffix(' ...')} " in reason
    assert shortened("short\nreason") == "short reason"
