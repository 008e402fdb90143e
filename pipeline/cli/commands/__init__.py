"""The commands. Each module declares the options of some commands and runs them. Imports that a command needs happen
when it runs."""
