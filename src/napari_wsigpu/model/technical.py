"""Metadata fields that may be shown to anyone: one table with a section per vendor.

All other fields are hidden, names and values. List a field as a number or text only if the
scanner's software fills it in, so that nobody can have typed a patient's name into it. Names are
compared ignoring case, spaces and punctuation, and any two numbers of up to three digits match.
``Outer.Inner`` is an `Inner` directly within an `Outer`; it takes precedence over a plain `Inner`.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import NamedTuple


class Kind(Enum):
    """Kind of a field's value.

    NUMBER
        Numbers with or without units, or yes and no. Any other value is hidden.
    TEXT
        Text that the scanner's software writes.
    GROUP
        A group of other fields. Any text of the group itself is hidden.
    PRIVATE
        Data about the patient or the examination, such as operator, place and time. Only the
        field's name is shown.
    """

    NUMBER = 1
    TEXT = 2
    GROUP = 3
    PRIVATE = 4


class Section(NamedTuple):
    """Names of the fields in one section of the metadata, separated by spaces."""

    numbers: str = ""
    texts: str = ""
    groups: str = ""
    private: str = ""


SECTIONS = {
    # Fields that all slides have, whatever their vendor.
    "": Section(
        numbers="objective mpp icc_profile", texts="vendor scanner", private="scan_date barcode"
    ),
    "tiff": Section(
        numbers="XResolution YResolution XPosition YPosition",
        texts="Make Model Software ResolutionUnit",
        private="ImageDescription DateTime Artist HostComputer Copyright DocumentName",
    ),
    "aperio": Section(
        numbers="""
            AppMag MPP Left Top OriginalWidth OriginalHeight StripeWidth Filtered FocusOffset
            LineCameraSkew LineAreaXOffset LineAreaYOffset ExposureTime ExposureScale Gamma Rack
            CalibrationAverageRed CalibrationAverageGreen CalibrationAverageBlue""",
        texts="""
            Parmset ScanScopeID ScannerType SessionMode DisplayColor ICCProfile ScanWarning""",
        private="""
            Header Filename Title Date Time TimeZone User Barcode DSRID ImageID ImageName Comment
            Slide""",
    ),
    "hamamatsu": Section(
        numbers="""
            SourceLens ObjectiveLensMagnificant XOffsetFromSlideCentre YOffsetFromSlideCentre
            ZOffsetFromSlideCentre ZOffsetFromSlideCenter ExposureTime ExposureRatio RedMultiplier
            GreenMultiplier BlueMultiplier FocusOffset FocusTime FullyAutoFocus RefocusInterval
            ScanTime WriteTime LampAge Wavelength JpegQuality FileFormat CaptureMode TissueIndex
            colorfilterID cubekind stagecenter slidetickness ccdheight ccdwidth ccdwidthploidy
            coarsefocuspitch finefocuspitch laneshiftamount exposurebarcodemacro exposureslidemacro
            exposureslidedarkfieldmacro roibarcodemacro roislidemacro variableexposuretime
            targetwhiteintensity systemversion focalplaneleftbottom
            focalplanelefttop focalplanerightbottom focalplanerighttop slantleftbottom slantlefttop
            slantrightbottom slantrighttop validDDKP validDLTP validDSHP PSHV PSHV10x PSHVploidy
            PSHVploidy10x YRNP0 zCoarse0 zFine0 65420 65421 65422 65423 65424 65425 65426 65428
            65432 65433 65434 65435 65436 65437 65438 65439 65440 65441 65442 65443 65445 65446
            65456 65457 65458""",
        texts="""
            Product Fluorescence calibrationversion AHEX0 AHEX0fluorescence AHEX0ploidy
            MHLN-0-24bit MHLN-0-36bit""",
        private="""
            Reference Barcode Created Updated NDPSN MacroSN ScannerSerialNumber Operator AuthCode
            NDPShadingDataVersion""",
    ),
    "leica": Section(
        numbers="aperture objective regions",
        texts="illumination-source device-model device-version",
        private="creation-date barcode",
    ),
    "philips": Section(
        numbers="""
            DICOM_BITS_ALLOCATED DICOM_BITS_STORED DICOM_HIGH_BIT DICOM_SAMPLES_PER_PIXEL
            DICOM_PIXEL_REPRESENTATION DICOM_PLANAR_CONFIGURATION DICOM_PIXEL_SPACING
            DICOM_PIXEL_SPACING_mm DICOM_LOSSY_IMAGE_COMPRESSION
            DICOM_LOSSY_IMAGE_COMPRESSION_RATIO PIM_DP_IMAGE_ROWS PIM_DP_IMAGE_COLUMNS
            PIIM_DP_SCANNER_RACK_NUMBER PIIM_DP_SCANNER_SLOT_NUMBER PIIM_DP_SCANNER_RACK_PRIORITY
            PIIM_DP_PIXEL_DATA_REPRESENTATION_POSITION PIIM_PIXEL_DATA_REPRESENTATION_COLUMNS
            PIIM_PIXEL_DATA_REPRESENTATION_ROWS PIIM_PIXEL_DATA_REPRESENTATION_NUMBER
            UFS_IMAGE_NUMBER_OF_BLOCKS UFS_IMAGE_DIMENSIONS_OVER_BLOCK UFS_IMAGE_DIMENSION_RANGE
            UFS_IMAGE_DIMENSION_SCALE_FACTOR UFS_IMAGE_BLOCK_SIZE UFS_IMAGE_BLOCK_COORDINATE
            UFS_IMAGE_BLOCK_DIMENSION_RANGE""",
        texts="""
            DICOM_MANUFACTURER DICOM_MANUFACTURERS_MODEL_NAME DICOM_SOFTWARE_VERSIONS
            DICOM_PHOTOMETRIC_INTERPRETATION DICOM_LOSSY_IMAGE_COMPRESSION_METHOD
            PIM_DP_UFS_INTERFACE_VERSION PIM_DP_IMAGE_TYPE PIIM_DP_SCANNER_CALIBRATION_STATUS
            UFS_IMAGE_DIMENSION_NAME UFS_IMAGE_DIMENSION_TYPE UFS_IMAGE_DIMENSION_UNIT
            UFS_IMAGE_BLOCK_COMPRESSION_METHOD""",
        groups="""
            PIM_DP_SCANNED_IMAGES PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE UFS_IMAGE_GENERAL_HEADERS
            UFS_IMAGE_DIMENSIONS UFS_IMAGE_DIMENSION_RANGES UFS_IMAGE_BLOCK_HEADERS
            UFS_IMAGE_BLOCK_HEADER_TEMPLATES DP_COLOR_MANAGEMENT""",
        private="""
            DICOM_ACQUISITION_DATETIME DICOM_DATE_OF_LAST_CALIBRATION DICOM_DEVICE_SERIAL_NUMBER
            DICOM_TIME_OF_LAST_CALIBRATION DICOM_DERIVATION_DESCRIPTION PIM_DP_UFS_BARCODE
            PIM_DP_SOURCE_FILE PIM_DP_IMAGE_DATA PIIM_DP_SCANNER_OPERATOR_ID""",
    ),
    "ventana": Section(
        numbers="""
            Magnification ScanRes ScanWhitePoint Z-layers Z-spacing FocusQuality Gamma Sharpness
            Contrast Brightness ShowLabel LabelBoundary regions""",
        texts="ScannerModel BuildVersion ScanMode Mode FocusMode",
        private="""
            Barcode1D Barcode2D UserName SlideAnnotation JP2FileName BuildDate UnitNumber""",
    ),
    "trestle": Section(
        numbers="ObjectivePower WhiteBalance ImageSize JPEGQuality OverlapsXY Exposure Gain",
        texts="BackgroundColor",
        private="Copyright User",
    ),
    "huron": Section(numbers="Resolution Objective Exposure Gain", private="Barcode User Date"),
    "argos": Section(numbers="MinZ MaxZ ObjectiveMagnification", private="Barcode"),
    "mirax": Section(
        numbers="""
            SLIDE_VERSION CURRENT_SLIDE_VERSION IMAGENUMBER_X IMAGENUMBER_Y OBJECTIVE_MAGNIFICATION
            CameraImageDivisionsPerSide ADAPTER_SIZE OUTPUT_RESOLUTION COMPRESSION_FACTOR
            VIMSLIDE_BITDEPTH VIMSLIDE_SLIDE_BITDEPTH SLIDE_POSITION_X SLIDE_POSITION_Y HIER_COUNT
            HIER_0_COUNT NONHIER_COUNT NONHIER_0_COUNT FILE_COUNT OVERLAP_X OVERLAP_Y
            MICROMETER_PER_PIXEL_X MICROMETER_PER_PIXEL_Y IMAGE_FILL_COLOR_BGR DIGITIZER_WIDTH
            DIGITIZER_HEIGHT IMAGE_CONCAT_FACTOR IMAGE_COMPRESSION_FACTOR EXPOSURE_TIME
            FILTER_COLOR_R FILTER_COLOR_G FILTER_COLOR_B DIGITAL_GAIN GAIN""",
        texts="""
            SLIDE_TYPE OBJECTIVE_NAME CAMERA_TYPE COMPRESSION SCANNER_HARDWARE_VERSION
            SCANNER_SOFTWARE_VERSION IMAGE_FORMAT FILTER_NAME INDEXFILE FILE_0 HIER_0_NAME
            HIER_0_SECTION HIER_0_VAL_0 HIER_0_VAL_0_SECTION NONHIER_0_NAME NONHIER_0_SECTION
            NONHIER_0_VAL_0 NONHIER_0_VAL_0_SECTION THUMBNAIL_IMAGE_TYPE BARCODE_IMAGE_TYPE
            PREVIEW_IMAGE_TYPE""",
        groups="""
            GENERAL HIERARCHICAL DATAFILE LAYER_0_SECTION LAYER_0_LEVEL_0_SECTION
            NONHIERLAYER_0_SECTION NONHIERLAYER_0_LEVEL_0_SECTION""",
        private="""
            SLIDE_ID SLIDE_NAME PROJECT_NAME SLIDE_CREATIONDATETIME SLIDE_UTC_CREATIONDATETIME
            BARCODE_VALUE""",
    ),
    "dicom": Section(
        numbers="""
            AcquisitionDuration BitsAllocated BitsStored BurnedInAnnotation Columns
            DimensionIndexPointer ExposureTime ExtendedDepthOfField FileMetaInformationGroupLength
            FunctionalGroupPointer HighBit IlluminationWaveLength ImageOrientationSlide
            ImagedVolumeDepth ImagedVolumeHeight ImagedVolumeWidth InConcatenationNumber
            InConcatenationTotalNumber ConcatenationFrameOffsetNumber InstanceNumber
            LossyImageCompression LossyImageCompressionRatio NumberOfFocalPlanes NumberOfFrames
            NumberOfOpticalPaths ObjectiveLensNumericalAperture ObjectiveLensPower
            CondenserLensPower PixelPaddingValue PixelRepresentation PixelSpacing
            PlanarConfiguration RecommendedAbsentPixelCIELabValue RescaleIntercept RescaleSlope
            Rows SamplesPerPixel SeriesNumber SliceThickness SpacingBetweenSlices
            SpecimenLabelInImage TotalPixelMatrixColumns TotalPixelMatrixFocalPlanes
            TotalPixelMatrixRows XOffsetInSlideCoordinateSystem YOffsetInSlideCoordinateSystem
            ZOffsetInSlideCoordinateSystem DistanceBetweenFocalPlanes""",
        texts="""
            DimensionOrganizationType DimensionDescriptionLabel FocusMethod FrameType
            IlluminationColor ImageType ImplementationClassUID ImplementationVersionName
            LossyImageCompressionMethod Manufacturer ManufacturerModelName MediaStorageSOPClassUID
            Modality OpticalPathDescription OpticalPathIdentifier PhotometricInterpretation
            PositionReferenceIndicator SOPClassUID SoftwareVersions SpecificCharacterSet
            TransferSyntaxUID VolumetricProperties PresentationLUTShape RescaleType ColorSpace
            IlluminationTypeCodeSequence.CodeMeaning IlluminationTypeCodeSequence.CodeValue
            IlluminationTypeCodeSequence.CodingSchemeDesignator
            IlluminationColorCodeSequence.CodeMeaning IlluminationColorCodeSequence.CodeValue
            IlluminationColorCodeSequence.CodingSchemeDesignator LensesCodeSequence.CodeMeaning
            LensesCodeSequence.CodeValue LensesCodeSequence.CodingSchemeDesignator
            LightPathFilterTypeStackCodeSequence.CodeMeaning
            LightPathFilterTypeStackCodeSequence.CodeValue
            LightPathFilterTypeStackCodeSequence.CodingSchemeDesignator
            ImagePathFilterTypeStackCodeSequence.CodeMeaning
            ImagePathFilterTypeStackCodeSequence.CodeValue
            ImagePathFilterTypeStackCodeSequence.CodingSchemeDesignator
            ContainerTypeCodeSequence.CodeMeaning ContainerTypeCodeSequence.CodeValue
            ContainerTypeCodeSequence.CodingSchemeDesignator""",
        groups="""
            AcquisitionContextSequence ContainerTypeCodeSequence DimensionIndexSequence
            DimensionOrganizationSequence IlluminationColorCodeSequence
            IlluminationTypeCodeSequence ImagePathFilterTypeStackCodeSequence LensesCodeSequence
            LightPathFilterTypeStackCodeSequence OpticalPathSequence PixelMeasuresSequence
            SharedFunctionalGroupsSequence TotalPixelMatrixOriginSequence
            WholeSlideMicroscopyImageFrameTypeSequence PixelValueTransformationSequence""",
        private="""
            AccessionNumber AcquisitionDateTime BarcodeValue ContainerIdentifier ContentDate
            ContentTime DeviceSerialNumber DimensionOrganizationUID FrameOfReferenceUID
            ImageComments InstanceCreationDate InstanceCreationTime InstitutionAddress
            InstitutionName IssuerOfAccessionNumberSequence IssuerOfPatientIDQualifiersSequence
            IssuerOfTheContainerIdentifierSequence LabelText MediaStorageSOPInstanceUID
            OperatorsName PatientAge PatientBirthDate PatientComments PatientID PatientName
            PatientSex ReferringPhysicianName SeriesDescription SeriesInstanceUID SOPInstanceUID
            SpecimenDescriptionSequence StationName StudyDate StudyDescription StudyID
            StudyInstanceUID StudyTime""",
    ),
    "zeiss": Section(
        numbers="""
            SizeX SizeY SizeC SizeZ SizeT SizeS SizeM SizeB SizeH SizeR SizeI SizeV
            ComponentBitCount OriginalScanData JpegXrCompressionLevel ExcitationWavelength
            EmissionWavelength ExposureTime Binning LampIntensity NumericalAperture LensNA
            NominalMagnification CalibratedMagnification TotalMagnification WorkingDistance
            RefractiveIndex PinholeSizeAiry SectionThickness Color CenterPosition ContourSize
            AcquisitionWidth AcquisitionHeight Gain Offset DigitalGain Zoom Increment Start CutIn
            CutOut Attenuation""",
        texts="""
            PixelType OriginalCompressionMethod OriginalEncodingQuality OriginalEncodingAlgorithm
            AcquisitionMode IlluminationType ContrastMethod Fluor Channel.Name Channel.Id
            Channel.ShortName DyeName DyeId Immersion Correction Manufacturer.Manufacturer
            Manufacturer.Model Objective.Name Objective.Id Detector.Name Detector.Id
            Microscope.Name Microscope.Id LightSource.Name LightSource.Id Filter.Name Filter.Id
            FilterSet.Name FilterSet.Id Dichroic.Name Dichroic.Id Application.Name
            Application.Version LightSourceType Microscope.Type Detector.Type Medium""",
        groups="""
            Information Image Dimensions Channels Channel Z T S C M Scenes Scene Positions Interval
            Instrument Microscopes Microscope Objectives Objective Detectors Detector Filters
            Filter FilterSets FilterSet Dichroics Dichroic LightSources LightSource Manufacturer
            ObjectiveSettings DetectorSettings LightSourcesSettings LightSourceSettings
            IlluminationWavelength DetectionWavelength Application Tracks Track ObjectiveRef
            MicroscopeRef""",
        private="User Document AcquisitionDateAndTime Name Id Comment Description UserName",
    ),
    "olympus": Section(
        texts="Product_name Product_version Objective_name",
        private="""
            Document_name Document_file_path Document_note Document_author Document_company
            Stack_name""",
    ),
    "perkinelmer": Section(
        numbers="""
            DescriptionVersion ExposureTime SignalUnits IsUnmixedComponent Response BandIndex Min
            Max FactoryDefined HomeWavelength Wavelength Retardances TunableFilterEngaged dim V s_v
            Gain Offset Binning Bits FrameAverageCount MirrorImage RotateImage ROI
            EnableSaturationProtection JPEGQuality SampleIsTMA ScanEntireCoverslipRegion
            Magnification PixelSizeMicrons Color""",
        texts="""
            AcquisitionSoftware ImageType InstrumentType CameraName CameraType Objective
            ObjectiveName Channels.Name Filter.Name Filter.FilterID Bands-i.Name FixedFilter.Name
            Manufacturer PartNumber BandNames-i Exposure-i AutoExposeType TunableFilterBandwidth
            OpalKitType Compression CoverslipThickness Mode BarcodeFormats ReadoutSpeed
            ScanFocusBand MsiFocusBand OverviewBand ScanColorTable-k ScanColorTable-v subtype ref
            LensName Camera.Name Camera.Band""",
        groups="""
            Channels Responsivity Filter ScanProfile root CameraSettings Camera MsiBands MsiBands-i
            ScanBands ScanBands-i ExcitedFilterPair FilterPair EmissionFilter ExcitationFilter
            BandNames FixedFilter Bands TransmissionBands TransmissionBands-i Bands-i
            WavelengthGroup TunableFilterStates TunableFilterStates-i Exposure MsiResolution
            ScanResolution ScanColorTable""",
        private="""
            Identifier SlideID Barcode ComputerName UserName OperatorName SampleDescription
            StudyName ValidationCode Name Date""",
    ),
    "ome": Section(
        numbers="""
            SizeX SizeY SizeZ SizeC SizeT PhysicalSizeX PhysicalSizeY PhysicalSizeZ TimeIncrement
            BigEndian Interleaved SignificantBits SamplesPerPixel FirstC FirstT FirstZ IFD
            PlaneCount TheC TheT TheZ ExposureTime DeltaT PositionX PositionY PositionZ Color
            NominalMagnification CalibratedMagnification LensNA WorkingDistance RefractiveIndex
            Iris EmissionWavelength ExcitationWavelength PinholeSize Gain Voltage Offset Zoom
            AmplificationGain ReadOutRate Integration NDFilter Attenuation Wavelength Power
            CorrectionCollar CutIn CutOut CutInTolerance CutOutTolerance Transmittance AxisCount""",
        texts="""
            PhysicalSizeXUnit PhysicalSizeYUnit PhysicalSizeZUnit TimeIncrementUnit DimensionOrder
            Pixels.Type Pixels.PixelType Pixels.ID Channel.ID Channels.ID Channel.Name
            Channels.Name Channel.Fluor Channels.Fluor AcquisitionMode ContrastMethod
            IlluminationType EmissionWavelengthUnit ExcitationWavelengthUnit PinholeSizeUnit
            ExposureTimeUnit DeltaTUnit PositionXUnit PositionYUnit PositionZUnit
            WorkingDistanceUnit VoltageUnit ReadOutRateUnit PowerUnit Binning Medium Immersion
            Correction Manufacturer Model Instrument.ID Objective.ID Detector.ID Filter.ID
            FilterSet.ID Dichroic.ID LightSource.ID Laser.ID Arc.ID Filament.ID
            LightEmittingDiode.ID ObjectiveSettings.ID DetectorSettings.ID LightSourceSettings.ID
            Detector.Type Filter.Type Laser.Type Arc.Type Filament.Type Microscope.Type Image.ID
            Compression schemaLocation LaserMedium""",
        groups="""
            OME Image Pixels Channel Channels TiffData Plane Instrument Microscope Objective
            Detector Filter FilterSet Dichroic Laser Arc Filament LightEmittingDiode LightSource
            LightPath TransmittanceRange ObjectiveSettings DetectorSettings LightSourceSettings
            ImagingEnvironment MetadataOnly BinData""",
        private="""
            Name Creator Description AcquisitionDate Experimenter ExperimenterGroup Project Dataset
            Plate Screen UUID StructuredAnnotations ROI SerialNumber LotNumber""",
    ),
    "ome-zarr": Section(
        numbers="""
            bioformats2raw_layout datasets.path scale translation active coefficient inverted start
            end min max defaultT defaultZ multichannel""",
        texts="""
            version axes.name axes.type axes.unit coordinateTransformations.type channels.label
            color family rdefs.model downscale.type multiscales.type""",
        groups="""
            ome multiscales axes datasets coordinateTransformations omero channels window rdefs
            metadata kwargs""",
        private="name description id source plate well labels image-label method",
    ),
    "zarr": Section(),
    "wsigpu": Section(numbers="region", texts="vendor"),
    "openslide": Section(
        numbers="""
            mpp-x mpp-y objective-power level-count bounds-x bounds-y bounds-width bounds-height
            level0downsample level0width level0height level0tile-width level0tile-height icc-size
            associated_label_width associated_label_height associated_macro_width
            associated_macro_height associated_thumbnail_width associated_thumbnail_height""",
        texts="vendor background-color",
        private="comment quickhash-1 barcode",
    ),
}

BOUNDED = re.compile(r"(?<![0-9])[0-9]{1,3}(?![0-9])")
PUNCTUATION = re.compile(r"[\W_]+")


def normal(key: str) -> str:
    """Normalize a name: lower case, no punctuation, ``0`` for numbers of up to three digits."""
    return PUNCTUATION.sub("", BOUNDED.sub("0", key)).casefold()


def kind_of(section: str, parent: str, key: str) -> Kind | None:
    """Return the kind of a field's value; None if the field is unknown.

    Parameters
    ----------
    section : str
        Key in the outermost mapping, a vendor or ``"tiff"``; empty for keys of that mapping itself.
    parent : str
        Key of the mapping that holds the field, or of the list that holds that mapping.
    key : str
        The field's own key.
    """
    known = _fields(section)
    return known.get((normal(parent), normal(key))) or known.get(("", normal(key)))


@cache
def _fields(section: str) -> dict[tuple[str, str], Kind]:
    found = {}
    for kind, names in zip(Kind, SECTIONS[section], strict=True):
        for name in names.split():
            outer, _, inner = name.rpartition(".")
            found[normal(outer), normal(inner)] = kind
    return found
