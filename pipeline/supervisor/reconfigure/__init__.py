"""Changes while the server serves: settings, numbers of processes, adapters."""
