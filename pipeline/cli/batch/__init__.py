"""`pipeline run-batch`: a file of requests becomes a file of replies.

in.jsonl ──lines.py──► lines that have no reply yet ──runner.py──► server ──replies.py──► out.jsonl
"""
