import pytest

from napari_wsigpu.formats.fields import iso_date, number, positive_number, whole_number


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), ("0,25", 0.25), (" 20 ", 20), ("1e-4", 1e-4), (0.5, 0.5)]
)
def test_positive_numbers(text, value):
    assert positive_number(text) == number(str(text)) == value


@pytest.mark.parametrize(
    "text", [None, "", "abc", "nan", "inf", "-1", "0", "1e999", "1e300", "0x10", "1,000,0", {}, [1]]
)
def test_no_positive_numbers(text):
    assert positive_number(text) is None


@pytest.mark.parametrize("text", [None, "", "abc", "nan", "-inf", "1e999", "9" * 5000])
def test_no_numbers(text):
    with pytest.raises(ValueError, match="a number is missing or wrong"):
        number(text)


def test_whole_numbers():
    assert whole_number("-12") == -12
    with pytest.raises(ValueError, match="not whole"):
        whole_number("0.5")


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("2020:01:02 03:04:05", "2020-01-02T03:04:05"),
        ("20240229131415.5", "2024-02-29T13:14:15.500000"),
        ("20240229131415", "2024-02-29T13:14:15"),
        ("2012-05-04T11:22:33.000Z", "2012-05-04T11:22:33.000Z"),
        ("some day", "some day"),
        ("0000:00:00 00:00:00", None),
        (None, None),
    ],
)
def test_dates(text, date):
    assert iso_date(text) == date
