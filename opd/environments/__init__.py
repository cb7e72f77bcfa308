"""What episodes act on: games, calculators, sandboxes."""
