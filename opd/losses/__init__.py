"""Objectives. Each has a small file with the class that computes it and its section of the pipeline; `opd.config.objectives.OBJECTIVES`
maps names to these files. The other files compute what all objectives share."""
