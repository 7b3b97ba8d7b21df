"""What ``scripts/soak`` does: a server under mixed load, and what must hold while and after it."""
