"""Questions to servers with an OpenAI-compatible API: `requests` sends them, `text_server` reads the text of the answer, `answers_file` keeps
it."""
