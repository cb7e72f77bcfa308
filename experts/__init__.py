"""The registry of experts: what a model directory holds, whether it fits the student, and what was registered."""
