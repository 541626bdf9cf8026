"""Masked metadata keeps technical fields and nothing that can name a patient."""

import json
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.model.privacy import MASK, PRIVATE_IMAGES, Screen, masked
from napari_wsigpu.model.technical import SECTIONS, Kind, kind_of
from tests.conftest import shared_slide
from tests.writers import slides

# Metadata of vendors' files. Values that start with "!" are private.
PHILIPS = {
    "DICOM_ACQUISITION_DATETIME": "!20160718122300.000000",
    "DICOM_DATE_OF_LAST_CALIBRATION": ["!20160718"],
    "DICOM_TIME_OF_LAST_CALIBRATION": ["!101835"],
    "DICOM_DEVICE_SERIAL_NUMBER": "!FMT0107",
    "DICOM_LOSSY_IMAGE_COMPRESSION_METHOD": ["PHILIPS_DP_1_0"],
    "DICOM_MANUFACTURER": "Hamamatsu",
    "DICOM_PHOTOMETRIC_INTERPRETATION": "MONOCHROME2",
    "DICOM_MANUFACTURERS_MODEL_NAME": "UFS Scanner",
    "DICOM_PIXEL_SPACING": ["0.000226907", "0.000226891"],
    "DICOM_SOFTWARE_VERSIONS": ["1.6.6186", "20150402_R48"],
    "PIM_DP_UFS_BARCODE": "!MzMxMTk0MA==",
    "PIM_DP_UFS_INTERFACE_VERSION": "5.0",
    "PIM_DP_SOURCE_FILE": "!%FILENAME%",
    "PIIM_DP_SCANNER_OPERATOR_ID": "!jdoe42",
    "PIIM_DP_SCANNER_RACK_NUMBER": "15",
    "PIIM_DP_SCANNER_SLOT_NUMBER": "15",
    "PIM_DP_SCANNED_IMAGES": [
        {
            "PIM_DP_IMAGE_TYPE": "LABELIMAGE",
            "PIM_DP_IMAGE_DATA": "!/9j/4AAQSkZJRgABAQ",
            "PIM_DP_IMAGE_ROWS": 1024,
        }
    ],
}
LEICA = {
    "aperture": "0.4",
    "creation-date": "!2010-12-09T15:17:25.100Z",
    "illumination-source": "brightfield",
    "objective": "20",
    "device-model": "Leica SCN400",
    "device-version": "1.4.0.9691",
    "barcode": "!S21-10045",
    "regions": [[0, 0, 100, 200]],
    "S21-10045": "!Jane Roe liver",
}
VENTANA = {
    "BuildDate": "!Nov  9 2012 15:27:04",
    "UserName": "!pathologist1",
    "Barcode1D": "!1000123",
    "Barcode2D": "!2D-1000123",
    "SlideAnnotation": "!Roe, Jane; 2 of 3",
    "JP2FileName": "!C:\\cases\\OS-2.jp2",
    "ScannerModel": "VENTANA iScan HT",
    "UnitNumber": "!2000515",
    "Magnification": "40",
    "ScanRes": "0.2325",
    "Z-layers": "1",
    "BuildVersion": "3.3.1.1",
}
PERKINELMER = {
    "DescriptionVersion": "2",
    "AcquisitionSoftware": "VectraScan 1.0.0",
    "ImageType": "FullResolution",
    "Identifier": "!2c3f8a4e-8c71-4a3b-9d1c-1f5f1d9b2f3a",
    "SlideID": "!HandEcompressed_S21",
    "Barcode": "!BC-77120",
    "ComputerName": "!PATH-PC-07",
    "UserName": "!mmuster",
    "OperatorName": "!Max Muster",
    "SampleDescription": "!tonsil of J. Roe",
    "StudyName": "!PD-L1 trial 7",
    "ValidationCode": "!4281ff86778da65892c05151d5de738d",
    "ScanProfile": '!{"SampleName": "S21-1"}',
    "ExposureTime": 1070,
    "InstrumentType": "VECTRA",
    "Objective": "20x",
    "Channels": [{"Name": "DAPI", "Color": "0,0,255", "ExposureTime": 10}],
}
HAMAMATSU = {
    "Reference": "!BC 990112",
    "Created": "!2017/02/07",
    "Updated": "!2017/02/08",
    "SourceLens": "40",
    "XOffsetFromSlideCentre": "1200",
    "Product": "NanoZoomer",
    "MHLN[0].24bit": "_1357CJIPNKOXRjx",
    "AHEX[1].fluorescence": "00130000000B",
    "YRNP[1]": "0,0,0,0",
    "focalplane.lefttop": "87617,485288,112539",
    "calibration.version": "b249",
    "Fluorescence": "DAPI 2 (387)",
    "NDP.S/N": "!830023",
}
OME = {
    "Image": {
        "ID": "Image:0",
        "Name": "!Roe_Jane_01.czi",
        "AcquisitionDate": "!2020-02-03T04:05:06",
        "Description": "!biopsy of Roe",
    },
    "Pixels": {"SizeX": "2048", "PhysicalSizeX": "0.5", "TimeIncrement": "0.5"},
    "Channels": [{"ID": "Channel:0:0", "Name": "CD8", "Fluor": "Cy5", "ExposureTime": "12"}],
    "Experimenter": {"FirstName": "!Ada", "LastName": "!Lovelace", "Email": "!ada@example.org"},
    "Objective": {"NominalMagnification": "20", "Model": "Plan-Apo", "Immersion": "Oil"},
    "Detector": {"Type": "CMOS", "VoltageUnit": "V", "Manufacturer": "Acme"},
    "TiffData": [{"PhysicalSizeXUnit": "µm", "DimensionOrder": "XYCZT"}],
    "StructuredAnnotations": {"Value": "!operator Lovelace"},
}
DICOM = {
    "PatientName": "!ROE^JANE",
    "PatientID": "!0012345",
    "PatientBirthDate": "!19600101",
    "PatientSex": "!F",
    "AccessionNumber": "!A-2021-77",
    "StudyInstanceUID": "!1.2.840.99999.1",
    "FrameOfReferenceUID": "!1.2.840.99999.2",
    "Modality": "SM",
    "ImageType": ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"],
    "PhotometricInterpretation": "YBR_FULL_422",
    "SoftwareVersions": ["4.0", "b"],
    "LossyImageCompressionMethod": "ISO_10918_1",
    "SOPClassUID": "1.2.840.10008.5.1.4.1.1.77.1.6",
    "StudyID": "!ST-9",
    "StudyDate": "!20210304",
    "ContentTime": "!101112",
    "AcquisitionDateTime": "!20210304101112",
    "ContainerIdentifier": "!C-S21-77",
    "SpecimenDescriptionSequence": [{"SpecimenIdentifier": "!S21-77-A1", "Anatomy": "!liver"}],
    "LabelText": "!S21-77 A1 HE",
    "BarcodeValue": "!00S2177A1",
    "OperatorsName": "!Muster^Max",
    "ReferringPhysicianName": "!Doc^Tor",
    "InstitutionName": "!General",
    "StationName": "!SCAN02",
    "ImageComments": "!first cut",
    "Manufacturer": "Sectra",
    "ManufacturerModelName": "AT2",
    "DeviceSerialNumber": "!SS7001",
    "OpticalPathSequence": [
        {
            "OpticalPathIdentifier": "A",
            "OpticalPathDescription": "Brightfield",
            "IlluminationColor": "white",
            "IlluminationTypeCodeSequence": [
                {"CodeValue": "B", "CodingSchemeDesignator": "DCM", "CodeMeaning": "Full intensity"}
            ],
        }
    ],
    "PixelSpacing": [0.00025, 0.00025],
    "TotalPixelMatrixColumns": 46000,
}
MIRAX = {
    "GENERAL": {
        "SLIDE_ID": "!0A1B2C3D",
        "SLIDE_NAME": "!CMU-1-Saved",
        "PROJECT_NAME": "!Roe project",
        "SLIDE_CREATIONDATETIME": "!10/02/2009 16:12:17",
        "SLIDE_TYPE": "SLIDE_TYPE_BRIGHTFIELD",
        "OBJECTIVE_NAME": "Plan-Apochromat",
        "CAMERA_TYPE": "Marlin",
        "IMAGENUMBER_X": "100",
    },
    "Attributes": [{"Name": "!Patient name", "Value": "!Roe"}, {"Name": "!Gain", "Value": "!1.25"}],
}
APERIO = {
    "Header": "!Aperio Image Library v11;CMU-1",
    "AppMag": "20",
    "Parmset": "USM Filter",
    "DisplayColor": "white",
    "ScanScope ID": "CPAPERIOCS",
    "ScannerType": "GT450",
    "Filename": "!12345",
    "Title": "!Roe liver",
    "Date": "!12/29/09",
    "Time": "!09:59:15",
    "Time Zone": "!GMT-05:00",
    "User": "!b414003d-95c6",
    "Barcode": "!10045",
    "DSR ID": "!ap1-dsr",
    "ImageID": "!1004486",
    "Exposure Time": "109",
    "MPP": "0.4990",
    "ICC Profile": "ScanScope v1",
    "OriginalWidth": "46000",
}
VENDORS = {
    "philips": PHILIPS,
    "leica": LEICA,
    "ventana": VENTANA,
    "perkinelmer": PERKINELMER,
    "hamamatsu": HAMAMATSU,
    "ome": OME,
    "dicom": DICOM,
    "mirax": MIRAX,
    "aperio": APERIO,
}
NORMALISED = {
    "vendor": "leica",
    "scanner": "Leica SCN400 (7001)",
    "objective": 20.0,
    "mpp": [0.25, 0.25],
    "scan_date": "2021-03-04",
    "barcode": None,
    "icc_profile": True,
}


def leaves(value, path=()):
    """Yield (keys, value) of all fields that are not groups."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    if not items and not isinstance(value, dict):
        yield path, value
    for key, item in items:
        yield from leaves(item, (*path, key))


def at(value, path):
    """Return the value at a path of keys, or `MASK` if a part of the path is hidden."""
    for key in path:
        if value == MASK or (isinstance(value, dict) and key not in value):
            return MASK
        value = value[key]
    return value


def marked(value):
    return isinstance(value, str) and value.startswith("!")


def unmarked(value):
    if isinstance(value, dict):
        return {key: unmarked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unmarked(item) for item in value]
    return value[1:] if marked(value) else value


def hidden(section, fields):
    """Return the fields of a section that are shown."""
    return masked({section: fields})[section]


@pytest.mark.parametrize("vendor", VENDORS)
def test_vendors_fields(vendor):
    fields = VENDORS[vendor]
    shown = hidden(vendor, unmarked(fields))
    for path, value in leaves(fields):
        assert at(shown, path) == (MASK if marked(value) else value), path


def test_a_slides_metadata():
    metadata = NORMALISED | unmarked(VENDORS)
    shown = masked(metadata)
    assert list(shown) == list(metadata)
    for key in ("vendor", "scanner", "objective", "mpp", "barcode", "icc_profile"):
        assert shown[key] == metadata[key]
    assert shown["scan_date"] == MASK
    text = json.dumps(shown, ensure_ascii=False)
    for _, value in leaves(VENDORS):
        assert not marked(value) or value[1:] not in text or len(value) < 7


def test_names_of_unknown_fields_are_hidden_too():
    fields = {"AppMag": "20", "Jane Roe": "1", "Roe": {"MPP": 1}, "User": "x", "Barcode": ""}
    assert hidden("aperio", fields) == {"AppMag": "20", MASK: MASK, "User": MASK, "Barcode": ""}
    assert masked({"Jane Roe": {"MPP": 1}, "roe": 7, "mpp": None}) == {MASK: MASK, "mpp": None}


def test_outer_name_has_precedence():
    fields = {"Image": {"Name": "CD8"}, "Channels": [{"Name": "CD8"}, {"Name": "Cy3"}]}
    assert hidden("ome", fields)["Image"] == {"Name": MASK}
    fields["Image"]["Name"] = "Liver"
    assert hidden("ome", fields)["Channels"] == fields["Channels"]


@pytest.mark.parametrize("value", ["Doe", "20 of Doe", "2020-01-02", ["Doe"], "x" * 5000, {"a": 1}])
def test_text_in_a_number_field_is_hidden(value):
    assert "Doe" not in json.dumps(hidden("aperio", {"AppMag": value}))
    assert hidden("aperio", {"AppMag": value})["AppMag"] != value


@pytest.mark.parametrize(
    "value",
    [
        *("240x240", "0.25 µm", "-1.5e-3", "[0,0 46000x32893] (240x240)", '"0.1" "0.2"', "40X"),
        *("1/100", "20 x 30 mm", "12538720", "true", "Yes", 7, 0.5, True, None, "", [1, 2]),
    ],
)
def test_numbers_and_sizes_stay(value):
    assert hidden("aperio", {"AppMag": value}) == {"AppMag": value}


def test_repeated_private_values_are_hidden():
    metadata = {
        "scanner": "Scanner of s21-10045",
        "barcode": " S21-10045 ",
        "aperio": {
            "Parmset": "for s21-10045, HE",
            "ICC Profile": ["S21-10045"],
            "ScannerType": "S21",
            "AppMag": 7,
            "Filename": r"C:\cases\K77-01.svs",
            "SessionMode": "K77-01",
            "User": "Jane \t Roe",
            "DisplayColor": "Jane Roe 2.2, Jane\nRoe",
            "MRN": 123456,
            "ScanWarning": "of 123456",
        },
    }
    assert masked(metadata) == {
        "scanner": f"Scanner of {MASK}",
        "barcode": MASK,
        "aperio": {
            "Parmset": f"for {MASK}, HE",
            "ICC Profile": [MASK],
            "ScannerType": "S21",
            "AppMag": 7,
            "Filename": MASK,
            "SessionMode": MASK,
            "User": MASK,
            "DisplayColor": f"{MASK} 2.2, {MASK}",
            MASK: MASK,
            "ScanWarning": f"of {MASK}",
        },
    }


@pytest.mark.parametrize("dye", ["DAPI", "Hoechst 33342", "Alexa Fluor 488", "FITC"])
def test_dye_names_are_shown_in_channel_names(dye):
    found = hidden("ome", {"Image": {"Name": dye}, "Channels": [{"Name": dye}]})
    assert found == {"Image": {"Name": MASK}, "Channels": [{"Name": dye}]}


def test_dye_without_number_is_hidden():
    found = hidden("ome", {"Experimenter": "Alexa", "Channels": [{"Name": "Alexa"}]})
    assert found == {"Experimenter": MASK, "Channels": [{"Name": MASK}]}


@pytest.mark.parametrize(
    "text",
    [
        "<a b='1'/>",
        ' <?xml version="1.0"?>',
        '{"a": 1}',
        "x" * 5000,
        "scanned 2009-12-29 at noon",
        "2017:02:07 13:06:43",
        "12/29/09",
        "(12/29/2009)",
        r"from D:\cases\x",
        r"\\server\share",
        "/home/jdoe/x",
        "file:///x",
    ],
)
def test_documents_dates_and_paths_are_hidden(text):
    assert hidden("tiff", {"Software": text}) == {"Software": MASK}


@pytest.mark.parametrize(
    "text", ["1.6.6186", "20150402_R48", "1/2", "a < b", "46000x32914 [0,0 1x1]", "NDP.scan 2.5.89"]
)
def test_other_texts_stay(text):
    assert hidden("tiff", {"Software": text}) == {"Software": text}


def test_metadata_is_not_changed():
    metadata = {"aperio": dict(APERIO), "mpp": [1, 2]}
    before = json.dumps(metadata)
    masked(metadata)
    assert json.dumps(metadata) == before


def test_too_many_private_values_hide_all_texts():
    fields = {
        "User": [f"patient {index} of the many" for index in range(20_000)],
        "Parmset": [f"{index} of the many" for index in range(20_000)],
        "MPP": 0.25,
    }
    start = time.process_time()
    shown = hidden("aperio", fields)
    assert time.process_time() - start < 5
    assert set(shown["Parmset"]) == {MASK}
    assert shown["MPP"] == 0.25


@pytest.mark.parametrize(
    "private", [["a" * 64], ["a" * n + "b" for n in range(4, 250)], ["ab" * 2000], ["aaaa"]]
)
def test_search_time_is_linear_in_text_length(private):
    fields = {"User": private, "Parmset": ["a" * 4000] * 20}
    start = time.process_time()
    hidden("aperio", fields)
    assert time.process_time() - start < 2


def test_number_pattern_does_not_backtrack():
    start = time.process_time()
    for text in ("1 x " * 1000, "1" * 4000, "1 , " * 1000 + "!", "1" * 4000 + "!", "1 x 1 " * 600):
        hidden("aperio", {"AppMag": text + "?"})
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("The file is cut off.", "The file is cut off."),
        ("'a b.tif' lacks 'Roe.tif'.", f"'a b.tif' lacks '{MASK}'."),
        ("'/x/a b.tif' can't be read.", "'/x/a b.tif' can't be read."),
        ("The slide's images 'Jane's 1' and 'O'Roe' can't.", f"The slide's images '{MASK}' can't."),
        ("2 images: \"Jane's\" (4 x 5), 'b'.", f"2 images: \"{MASK}'."),
        ("It is of S21-10045.", f"It is of {MASK}."),
    ],
)
def test_messages_name_only_the_slide(sentence, shown):
    assert Screen({"barcode": "S21-10045"}, "/x/a b.tif").sentence(sentence) == shown


def test_common_words_stay_in_messages():
    screen = Screen({"ome-zarr": {"name": "image"}, "aperio": {"User": "Roe Image"}})
    sentence = "A label image is left out of roe image."
    assert screen.sentence(sentence) == f"A label image is left out of {MASK}."


def test_the_table_is_in_order():
    """No field is listed twice, and no private field is in a group that is hidden completely."""
    for section, kinds in SECTIONS.items():
        names = [name for names in kinds for name in names.split()]
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
        for kind, listed in zip(Kind, kinds, strict=True):
            for name in listed.split():
                parent, _, key = name.rpartition(".")
                assert kind_of(section, parent, key) is kind, (section, name)


SECRETS = st.text(min_size=3, max_size=12).map(lambda text: f"q{text}".strip())  # no number
PUBLIC_KEYS = st.sampled_from(["AppMag", "Parmset", "ScannerType", "StripeWidth", "ICC Profile"])
PRIVATE_KEYS = st.sampled_from(["User", "Barcode", "Patient", "Title", "Gain of Roe", "名前"])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
PUBLIC = st.recursive(
    TEXTS | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(PUBLIC_KEYS, values, max_size=4),
    max_leaves=12,
)


@st.composite
def metadata_with_secrets(draw):
    """Metadata and the private texts in it; some public fields repeat them."""
    secrets = draw(st.lists(SECRETS, max_size=5))
    assume(all(len(secret) >= 4 and secret.casefold() not in MASK for secret in secrets))
    assume(not any(part in secret for secret in secrets for part in ("hidden", "[", "]")))
    fields = {}
    for number, secret in enumerate(secrets):
        nested = draw(st.sampled_from([secret, [secret], {"Anything": secret, "AppMag": 3}]))
        fields |= {
            f"{draw(PRIVATE_KEYS)}{' ' * number}": nested,
            draw(PUBLIC_KEYS): draw(PUBLIC),
            f"Scan{' ' * number}Warning": draw(TEXTS) + secret + draw(TEXTS),
        }
    return {"aperio": fields}, secrets


@given(metadata_with_secrets())
def test_no_private_value_survives(example):
    metadata, secrets = example
    shown = masked(metadata)
    json.dumps(shown)
    texts = [value for _, value in leaves(shown) if isinstance(value, str)]
    for secret in secrets:
        assert not any(secret in text for text in texts)


@given(st.dictionaries(st.text(), PUBLIC, max_size=5), st.sampled_from([*SECTIONS, "unknown"]))
def test_any_metadata_is_accepted(fields, section):
    json.dumps(masked({section: fields} if section else fields))


@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "CMU-1-JP2K-Region.svs"])
def test_real_aperio_slides(name):
    with open_slide(shared_slide(name)) as slide:
        text = json.dumps(masked(slide.metadata))
    for private in ("12/29/09", "09:59:15", "b414003d", "CMU-1", "1004486", "2009"):
        assert private not in text
    for public in ("CPAPERIOCS", "USM Filter", "0.4990", "46000"):
        assert public in text


def test_a_real_hamamatsu_slide():
    with open_slide(shared_slide("ndpi-test3-DAPI-387.ndpi")) as slide:
        text = json.dumps(masked(slide.metadata))
        assert "2017" in json.dumps(slide.metadata)
    assert "2017" not in text
    for public in ("C9600-12", "_1357CJIPNKOXRjx", "12538720", "DAPI 2 (387)"):
        assert public in text


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("found/small_vectra.qptiff", ["FF01-453/571/709-25 Emission", "im_Fluorescence", "2630"]),
        (
            "found/sm_image_grayscale.dcm",
            ["TILED_FULL", "Epifluorescence", "0.000499"],
        ),
        ("found/vsi-ets-test-jpg2k.vsi", ["OLYMPUS cellSens Dimension", "UPLXAPO"]),
        ("found/4D-series.ome.tiff", ["XYZCT", '"SizeT": "7"', '"FirstZ"']),
    ],
)
def test_other_real_slides_keep_technical_fields(name, public):
    with open_slide(shared_slide(name)) as slide:
        text = json.dumps(masked(slide.metadata), ensure_ascii=False)
    for private in ("Test^Patient", "S19-1", "ferranda", "RTM61", "albert_einstein", "20190604"):
        assert private not in text
    for value in public:
        assert value in text


def test_scripts_get_all_metadata(tmp_path):
    fields = ("AppMag = 20", "MPP = 0.5", "Barcode = S21-10045", "User = jdoe", "Filename = S21")
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(60, 60), (), fields=fields)
    with open_slide(tmp_path / "slide.svs") as slide:
        assert slide.metadata["aperio"]["Barcode"] == "S21-10045"
        shown = masked(slide.metadata)
    assert "S21-10045" not in json.dumps(shown)
    assert shown["aperio"]["AppMag"] == "20"


def test_private_images():
    assert {"label", "macro"} == PRIVATE_IMAGES


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Hans Mueller 1944-03-17", MASK),
        ("/home/jane/slides", MASK),
        ("<Patient>Jane</Patient>", MASK),
        ("x" * 5000, MASK),
        ("DAPI", "DAPI"),
        ("CD3 (Opal 520)", "CD3 (Opal 520)"),
        ("Lee", MASK),
        ("Lee 2", f"{MASK} 2"),
        ("Leeds", "Leeds"),
        ("Sleep", "Sleep"),
        ("lee-1", f"{MASK}-1"),
    ],
)
def test_channel_names_are_masked_like_texts(name, shown):
    screen = Screen({"aperio": {"PatientName": "Lee", "MPP": "0.5"}})
    assert screen.text(name) == shown


def test_short_common_words_stay():
    screen = Screen({"aperio": {"PatientName": ["RGB", "set", "no"]}})
    assert screen.text("RGB set no") == "RGB set no"
