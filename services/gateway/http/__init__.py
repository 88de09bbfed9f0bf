"""The HTTP side: server, admission, authentication, CORS, limits, bodies, errors."""
