"""Parts of the parsers: marks, JSON and other syntaxes in streamed text, and the events that come out."""
