"""The black box: episodes whose agent is a program that asks the student over HTTP, in the words of OpenAI or Anthropic.

`episode` runs a program (`program`) and makes an episode of what it asked; `server` is the HTTP server, `session` what one
program asks of the policy, `openai` and `anthropic` are the wire formats over the one form of `messages`.
"""
