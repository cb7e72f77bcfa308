"""Experts of many turns: rows that hold a whole episode, their tokens, and episodes that a solver plays."""
