"""Episodes for experts: rows that hold a whole episode, their tokens, and episodes that a solver plays."""
