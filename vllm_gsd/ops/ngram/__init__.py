"""Matching n-grams on the device."""
