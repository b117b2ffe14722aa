"""The command line: gin settings and one module for each command."""
