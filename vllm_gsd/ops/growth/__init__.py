"""Growing token graphs on the device."""
