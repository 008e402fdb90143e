"""Chats: what all dialects make of messages, their content and tools.

conversation.py     messages and template arguments
content_parts.py    parts of a message's content
images.py           images among them
tools.py            functions and tool_choice; custom_tools.py has those whose input is a text
tool_call_ids.py    ids that clients leave out
"""
