"""Matrix products for CPUs, which have nothing to do with speculation."""
