"""MIRAX slides of 3DHISTECH."""
