"""`opd evaluate`: models on the exams of a pipeline, every expert on every domain, and public tasks."""
