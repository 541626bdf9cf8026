"""Where encoded bytes come from."""
