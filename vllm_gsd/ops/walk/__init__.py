"""The verification walk on the device."""
