"""The parts of ``scripts/soak``: a server, its load, and the checks during and after the load."""
