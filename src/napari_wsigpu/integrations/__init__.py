"""What makes other libraries read slides by this one; each module needs that of its name."""
