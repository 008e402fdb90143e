"""`pipeline ps` and `pipeline top`: list running servers, and watch one."""
