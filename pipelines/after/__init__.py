"""Uses of a merged model: export it, serve it, talk to it."""
