"""The "Channels" dock."""
