"""The web page at `/`: a chat, and a live view of the pipeline (see admin/live_state.py).

Its files are in `static/`, are served as they are, and load nothing from elsewhere.
"""
