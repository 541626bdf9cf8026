"""DICOM slides: instances in files and on servers."""
