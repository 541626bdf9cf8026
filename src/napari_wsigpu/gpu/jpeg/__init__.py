"""JPEGs, and other code streams that nvImageCodec decodes."""
