"""The admin server, its client, and the stats that it answers with."""
