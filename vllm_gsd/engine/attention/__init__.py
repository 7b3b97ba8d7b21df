"""Attention backends whose rows may attend along a token graph."""
