"""Drives the web page in a headless Chromium against a real server; see `python -m tools.check_page --help`."""
