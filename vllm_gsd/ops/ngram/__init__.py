"""N-gram hypotheses on the device."""
