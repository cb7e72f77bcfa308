"""Two vocabularies side by side: the bytes of tokens, a response in a teacher's tokens, and which parts of the two are the same text."""
