"""What episodes act on: games, calculators, sandboxes. Each is a file here and a line of `ENVIRONMENTS`."""

ENVIRONMENTS: dict[str, str] = {}
"""Name in a pipeline -> its class, as `module:Class`."""
