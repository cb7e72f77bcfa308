"""The black box: episodes whose agent is a program that asks the student over HTTP, in the words of OpenAI or Anthropic.

`episode` runs a program (`program`) and makes an episode of its requests. `server` is the HTTP server, `session` answers the requests of one
program, and `openai` and `anthropic` convert their wire formats to and from the one form of `messages`.
"""
