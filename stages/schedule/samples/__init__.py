"""Several sequences of one request: parallel samples and beams."""
