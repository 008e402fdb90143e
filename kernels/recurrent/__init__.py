"""Layers with a recurrent state in place of attention, in torch; and their sizes."""
