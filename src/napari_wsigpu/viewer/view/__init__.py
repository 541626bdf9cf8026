"""Which part of a slide a viewer shows: camera, regions and arrangement."""
