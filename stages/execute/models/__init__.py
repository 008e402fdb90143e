"""The models: each file records one family's forward pass; `registry` finds it by architecture."""
