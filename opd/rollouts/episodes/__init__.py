"""Episodes: rollouts of several turns, in which the policy and an environment or an agent's program take turns.

An episode is a `Trace` of segments (`trace`). The white box (`runner`) calls an environment; its engine is `engine`, what it
appends to a dialogue comes from `chat`, and `tools` reads the calls that the policy writes.
"""
