"""The data model of a slide: its layout, metadata, errors and limits, without its bytes."""
