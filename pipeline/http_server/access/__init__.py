"""Who may send a request: API keys and what they may use, origins, CORS."""
