"""The stages' processes: started, watched, and asked whether their loops run."""
