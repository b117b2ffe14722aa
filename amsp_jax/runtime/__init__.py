"""Processes: start-up on one or many hosts, the watchdog, exit codes."""
