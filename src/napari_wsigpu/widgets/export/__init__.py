"""The "Export" dock."""
