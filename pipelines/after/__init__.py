"""What a person does with a merged model: export it, serve it, talk to it."""
