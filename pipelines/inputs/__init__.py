"""Read and check all inputs of a pipeline before any compute: models, experts, prompts, exams, memory."""
