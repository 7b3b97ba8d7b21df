"""Walking along flattened graphs on the device."""
