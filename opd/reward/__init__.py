"""Learning from a task reward, beside the divergence: a stream of its own with its own mean, weight and metrics.

`verified` gives responses their rewards, or `preference` does by a discriminator. `stream` turns the rewards of a step into advantages
(`opd/credit/`) and says how much they weigh, `records` is what driver, trainer and metrics hand to each other. The gradient is in
`opd/losses/policy_gradient.py`.
"""
