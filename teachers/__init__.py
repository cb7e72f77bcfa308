"""The teacher pool: scores the student's tokens with the expert of each row's domain."""
