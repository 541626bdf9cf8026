"""Nothing that names a patient is left in masked metadata, and what says no such thing stays."""

import json
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.privacy import MASK, PRIVATE_IMAGES, is_private, masked
from tests import slides
from tests.conftest import shared_slide

# What vendors' files say of a slide. In each, values that begin with "!" are private.
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
    "collection": {
        "name": "!Jane Roe liver",
        "uuid": "!34ba28be-1f1d-11e0-af2c-101f74d7b0d7",
        "barcode": "!S21-10045",
        "sizeX": "26363696",
    },
    "image": {
        "name": "!image_0001 Roe",
        "creationDate": "!2010-12-09T15:17:25.100Z",
        "device": {"model": "Leica SCN400", "version": "1.4.0.9691"},
        "scanSettings": {"objective": "20", "illuminationSource": "brightfield"},
        "numericalAperture": "0.4",
    },
}
VENTANA = {
    "iScan": {
        "BuildDate": "!Nov  9 2012 15:27:04",
        "UserName": "!pathologist1",
        "Barcode1D": "!1000123",
        "Barcode2D": "!2D-1000123",
        "SlideAnnotation": "!Roe, Jane; 2 of 3",
        "JP2FileName": "!C:\\cases\\OS-2.jp2",
        "ScannerModel": "VENTANA iScan HT",
        "UnitNumber": "2000515",
        "Magnification": "40",
        "ScanRes": "0.2325",
        "Z-layers": "1",
        "BuildVersion": "3.3.1.1",
    }
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
    "NDP.S/N": "830023",
    "tiff": {"DateTime": "!2017:02:07 13:06:43", "Model": "C9600-12", "HostComputer": "!LAB3-PC"},
}
OME = {
    "Image": {
        "ID": "!Image:0",
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
    "Attributes": [{"Name": "!Patient name", "Value": "!Roe"}, {"Name": "Gain", "Value": "1.25"}],
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


def leaves(value):
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def shape(value):
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return None


def marked(value):
    return isinstance(value, str) and value.startswith("!")


def unmarked(value):
    if isinstance(value, dict):
        return {key: unmarked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unmarked(item) for item in value]
    return value[1:] if marked(value) else value


@pytest.mark.parametrize("vendor", VENDORS)
def test_vendors_fields(vendor):
    fields = VENDORS[vendor]
    hidden = masked({vendor: unmarked(fields)})
    for before, after in zip(leaves(fields), leaves(hidden), strict=True):
        assert after == (MASK if marked(before) else before)


def test_a_slides_metadata():
    metadata = NORMALISED | unmarked(VENDORS)
    hidden = masked(metadata)
    assert shape(hidden) == shape(metadata)
    for key in ("vendor", "scanner", "objective", "mpp", "barcode", "icc_profile"):
        assert hidden[key] == metadata[key]
    assert hidden["scan_date"] == MASK
    text = json.dumps(hidden, ensure_ascii=False)
    for value in filter(marked, leaves(VENDORS)):
        assert value[1:] not in text or len(value) < 5


@pytest.mark.parametrize(
    "names",
    [
        ("tiff", "ImageDescription"),
        ("tiff", "Artist"),
        ("tiff", "DocumentName"),
        ("patient", "eyes"),
        ("PATIENTNAME",),
        ("slideid",),
        ("Slide", "ID"),
        ("case", "history", 0),
        ("scannedBy",),
        ("hostname",),
        ("病人姓名",),
        ("Имя",),
    ],
)
def test_private_names(names):
    assert is_private([str(name) for name in names])


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("tiff", "Software"),
        ("tiff", "Make"),
        ("tiff", "Model"),
        ("SamplesPerPixel",),
        ("BitsPerSample",),
        ("LightPath", "Filter"),
        ("Channels", "Name"),
        ("StainName",),
        ("0",),
        ("profile",),
        ("", "x"),
        *[(key,) for key in NORMALISED if key not in ("scan_date", "barcode")],
    ],
)
def test_public_names(names):
    assert not is_private(names)


def test_a_private_value_is_hidden_where_it_is_repeated():
    metadata = {
        "scanner": "Scanner of s21-10045",
        "barcode": " S21-10045 ",
        "x": {"Parmset": "for s21-10045, HE", "Camera": ["S21-10045"], "Lens": "S21", "Count": 7},
        "Number": 123456,
        "AccessionNumber": 123456,
        "Filename": r"C:\cases\K77-01.svs",
        "Focus": "K77-01",
        "Author": "Jane \t Roe",
        "Gamma": "Jane Roe 2.2",
    }
    assert masked(metadata) == {
        "scanner": f"Scanner of {MASK}",
        "barcode": MASK,
        "x": {"Parmset": f"for {MASK}, HE", "Camera": [MASK], "Lens": "S21", "Count": 7},
        "Number": MASK,
        "AccessionNumber": MASK,
        "Filename": MASK,
        "Focus": MASK,
        "Author": MASK,
        "Gamma": f"{MASK} 2.2",
    }


@pytest.mark.parametrize("dye", ["DAPI", "Hoechst 33342", "Alexa Fluor 488", "FITC"])
def test_the_name_of_a_dye_is_told_of_channels_though_it_is_hidden_elsewhere(dye):
    fields = {"Image": {"Name": dye}, "Channels": [{"Name": dye}, {"Name": "Cy3"}]}
    found = masked({"ome": fields})["ome"]
    assert found == {"Image": {"Name": MASK}, "Channels": [{"Name": dye}, {"Name": "Cy3"}]}


def test_a_dye_without_its_number_can_be_a_person():
    found = masked({"ome": {"PatientName": "Alexa", "Channels": [{"Name": "Alexa"}]}})
    assert found["ome"] == {"PatientName": MASK, "Channels": [{"Name": MASK}]}


def test_none_and_empty_texts_stay():
    metadata = {"barcode": None, "User": "", "Date": [], "patient": {}, "Title": False, "Time": 0}
    assert masked(metadata) == metadata | {"Title": MASK, "Time": MASK}


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
def test_texts_that_tell_much_are_hidden_whole(text):
    assert masked({"Software": text}) == {"Software": MASK}


@pytest.mark.parametrize(
    "text", ["1.6.6186", "20150402_R48", "1/2", "a < b", "46000x32914 [0,0 1x1]", "NDP.scan 2.5.89"]
)
def test_other_texts_stay(text):
    assert masked({"Software": text}) == {"Software": text}


def test_metadata_is_not_changed():
    metadata = {"aperio": dict(APERIO), "mpp": [1, 2]}
    before = json.dumps(metadata)
    masked(metadata)
    assert json.dumps(metadata) == before


def test_very_many_private_values_hide_all_texts_in_no_time():
    metadata = {
        "case": [f"patient {index} of the many" for index in range(20_000)],
        "camera": [f"{index} of the many" for index in range(20_000)],
        "MPP": 0.25,
    }
    start = time.perf_counter()
    hidden = masked(metadata)
    assert time.perf_counter() - start < 5
    assert set(hidden["camera"]) == {MASK}
    assert hidden["MPP"] == 0.25


@pytest.mark.parametrize(
    "key",
    [
        *("Vorname", "Nachname", "Nom", "Prénom", "Fallnummer", "ID", "PID", "NHS", "Ward"),
        *("Consultant", "Encounter", "Admission", "Custom1", "Pat.", "ptname", "Signed out"),
        *("Tag", "Info", "AdmissionID", "MedicalRecordLocator", "MedicalAlerts", "Allergies"),
        *("Occupation", "CountryOfResidence", "MilitaryRank", "RequestingService"),
        *("ReasonForVisit", "SpecialNeeds", "DeviceSerialNumber", "Filter Nachname", "Имя Filter"),
        *("Name", "Value", "Unit", "Class", "Image", "", "0"),
        *("Stage", "Problems", "problems", "Background", "Interpretation"),
    ],
)
def test_texts_of_unknown_keys_are_hidden(key):
    for value in ("Doe, Jane", "F", "01.02.1960", "1 Feb 1960", "20200131", "20200131101112"):
        metadata = {"aperio": {key: value}, "dicom": {"Items": [{key: [value]}]}}
        assert masked(metadata) == {"aperio": {key: MASK}, "dicom": {"Items": [{key: [MASK]}]}}


@pytest.mark.parametrize("key", ["Fallnummer", "PID", "NHS", "Encounter", "AdmissionID"])
def test_numbers_of_cases_are_hidden(key):
    assert masked({key: "4711", "x": {key: 4711}}) == {key: MASK, "x": {key: MASK}}


@pytest.mark.parametrize(
    "value",
    [
        *("240x240", "0.25 µm", "-1.5e-3", "[0,0 46000x32893] (240x240)", '"0.1" "0.2"', "40X"),
        *("1/100", "20 x 30 mm", "12538720", "true", "Yes", 7, 0.5, True, None),
    ],
)
def test_numbers_and_sizes_of_unknown_keys_stay(value):
    assert masked({"Vetebrax": value}) == {"Vetebrax": value}


def test_a_number_that_can_be_a_date_is_hidden_unless_its_key_is_technical():
    metadata = {"Vetebrax": 20200131, "Q": "1 19600201", "Offset": "20210131", "R": "0.19991231"}
    assert masked(metadata) == metadata | {"Vetebrax": MASK, "Q": MASK}


def test_what_looks_like_many_numbers_is_judged_in_no_time():
    start = time.perf_counter()
    for text in ("1 x " * 1000, "1" * 4000, "1 , " * 1000 + "!", "1" * 4000 + "!", "1 x 1 " * 600):
        masked({"Vetebrax": text + "?"})
    assert time.perf_counter() - start < 2


def test_the_scanner_repeats_nothing_that_is_hidden():
    metadata = {
        "scanner": "Aperio ScanScope (SECRETUSER)",
        "aperio": {"ScanScope ID": "SECRETUSER", "User": "SECRETUSER", "AppMag": "20"},
    }
    assert masked(metadata) == {
        "scanner": f"Aperio ScanScope ({MASK})",
        "aperio": {"ScanScope ID": MASK, "User": MASK, "AppMag": "20"},
    }


UNKNOWN_WORDS = st.sampled_from(["Vetebra", "nachname", "Cognome", "kuzin", "Zimmer", "Ghijk"])
KNOWN_WORDS = st.sampled_from(["Filter", "Scanner", "Type", "Name", "Offset", "Version", "ID"])


@given(
    st.lists(KNOWN_WORDS, max_size=2),
    st.lists(UNKNOWN_WORDS, min_size=1, max_size=2),
    st.sampled_from(["", "aperio", "Scanner"]),
    st.text(max_size=8).map(lambda text: f"{text}Doe"),
)
def test_any_text_below_a_key_of_unknown_words_is_hidden(known, unknown, parent, text):
    for key in (" ".join(unknown + known), "_".join(known + unknown)):
        assert masked({parent: {key: text}}) == {parent: {key: MASK}}


PUBLIC_KEYS = st.sampled_from(["AppMag", "Gain", "Parmset", "Software", "StripeWidth", "objective"])
PRIVATE_KEYS = st.sampled_from(["User", "PIM_DP_UFS_BARCODE", "creationDate", "Patient", "Title"])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
PUBLIC = st.recursive(
    TEXTS | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(PUBLIC_KEYS, values, max_size=4),
    max_leaves=12,
)


@st.composite
def metadata_with_secrets(draw):
    """Metadata, and the private texts in it, some of them repeated in what is public."""
    secrets = draw(st.lists(st.text(min_size=4, max_size=12).map(str.strip), max_size=5))
    assume(all(len(secret) >= 4 and secret.casefold() not in MASK for secret in secrets))
    metadata = {}
    for number, secret in enumerate(secrets):
        nested = draw(st.sampled_from([secret, [secret], {"Anything": secret, "Gain": 3}]))
        key = draw(PRIVATE_KEYS)
        metadata[f"{number}"] = {
            key: nested,
            draw(PUBLIC_KEYS): draw(PUBLIC),
            "Camera": draw(TEXTS) + secret + draw(TEXTS),
        }
    return metadata | draw(st.dictionaries(PUBLIC_KEYS, PUBLIC, max_size=3)), secrets


@given(metadata_with_secrets())
def test_no_private_value_survives(example):
    metadata, secrets = example
    hidden = masked(metadata)
    json.dumps(hidden)
    assert shape(hidden) == shape(json.loads(json.dumps(metadata)))
    texts = [leaf for leaf in leaves(hidden | {"objective": None}) if isinstance(leaf, str)]
    for secret in secrets:
        assert not any(secret in text for text in texts)


PLAIN = st.text(st.sampled_from("aZ09 .,()äß"), max_size=12) | st.integers() | st.none()


@given(st.dictionaries(PUBLIC_KEYS, PLAIN | st.lists(PLAIN, max_size=3), max_size=5))
def test_plain_values_without_private_keys_stay(metadata):
    assert masked(metadata) == metadata


@given(st.lists(st.text(max_size=8), max_size=4))
def test_any_key_can_be_judged(names):
    assert is_private(names) in (True, False)
    assert is_private([*names, "PatientName"])
    assert is_private(["PatientName", *names])


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
    assert "C9600-12" in text


def test_scripts_get_all(tmp_path):
    fields = ("AppMag = 20", "MPP = 0.5", "Barcode = S21-10045", "User = jdoe", "Filename = S21")
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(60, 60), (), fields=fields)
    with open_slide(tmp_path / "slide.svs") as slide:
        assert slide.metadata["aperio"]["Barcode"] == "S21-10045"
        hidden = masked(slide.metadata)
    assert "S21-10045" not in json.dumps(hidden)
    assert hidden["aperio"]["AppMag"] == "20"


def test_private_images():
    assert {"label", "macro"} == PRIVATE_IMAGES
