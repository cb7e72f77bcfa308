"""The guard against reward hacking: asked before a tool call runs, while the episode goes on.

`build.build_guard` makes a `Guard` from the section `guard`; an episode calls `guard.session()` once and `guard.check(call,
session)` before each call. docs/guard.md has the rest.
"""
