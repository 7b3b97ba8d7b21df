"""The candidates of drafted blocks."""
