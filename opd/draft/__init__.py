"""A draft: a small model that guesses the student's next tokens, so that an engine checks several in one pass."""
