"""What a pipeline works on, read and checked before any compute: models, experts, prompts, exams, memory."""
