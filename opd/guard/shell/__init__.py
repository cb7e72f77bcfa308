"""A shell command read as the shell reads it: grammar, expansions, and which programs it would run on what.

`parser.parse` makes the tree (`nodes`), `walk.Walker` goes through it without running anything and lists what it would do.
"""
