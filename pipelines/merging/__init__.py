"""`opd merge`: a new run, the rest of an interrupted one, or several rounds one after the other."""
