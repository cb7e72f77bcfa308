"""Settings in YAML: models that refuse unknown keys, and errors that name the nearest known key."""
