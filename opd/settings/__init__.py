"""Reading YAML strictly: models that refuse unknown keys, and errors that name the nearest known one."""
