"""The rows of a step that verify graphs, on the device."""
