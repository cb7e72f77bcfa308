"""Episodes that experts learn from: rows of whole episodes (`rows`), their tokens (`encode`), episodes that a solver plays (`play`),
and prompts that are the beginnings of episodes (`prefixes`)."""
