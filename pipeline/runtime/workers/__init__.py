"""Helper processes of stages, which may be killed: for work whose time or memory a client's bytes choose."""
