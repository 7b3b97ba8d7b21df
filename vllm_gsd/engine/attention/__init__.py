"""Attention backends that can attend along token graphs."""
