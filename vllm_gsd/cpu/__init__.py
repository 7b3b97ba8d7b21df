"""Matrix products for CPUs; they do not depend on speculative decoding."""
