"""Flattening token graphs on the device."""
