"""`pipeline ps` and `pipeline top`: running servers, at a glance and live."""
