"""Episodes that a run keeps for people, turn by turn: which ones, in what form, and where they lie."""
