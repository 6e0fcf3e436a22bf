"""The `quire` command: one file for each subcommand.

Commands parse flags, and leave the work to the packages below. Modules import what only one command needs inside it, so
that `quire --help` starts quickly and no client imports torch.
"""
