"""Objectives: one small file each, with its section of the pipeline and what computes it, behind `opd.config.objectives.OBJECTIVES`."""
