"""The command line: finds the subcommand that was typed, and the subcommands that frame starts as child processes."""
