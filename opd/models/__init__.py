"""Model files, their weights and how their layers are computed."""
