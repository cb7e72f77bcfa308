"""The target stream: one Arrow format between teachers and trainer ranks, and on disk as the target log."""
