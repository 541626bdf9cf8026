"""Sources of encoded bytes: files, servers, streams, libraries and Zarr arrays."""
