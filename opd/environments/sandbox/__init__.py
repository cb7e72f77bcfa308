"""A small machine for coding tasks: `inside.py` is its first process, `box.py` its outside, `environment.py` what a policy sees.

driver ── Box ──JSON lines──▶ first process ──fork──▶ command
                              own namespaces,         limits, no rights,
                              own root in memory      killed with all it started
"""
