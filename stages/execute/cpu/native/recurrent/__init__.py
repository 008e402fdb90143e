"""Layers with a recurrent state of a program in the CPU library, and the slots of their states."""
