"""Grammars of replies, in llguidance's Lark syntax."""
