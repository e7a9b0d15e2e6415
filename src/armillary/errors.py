"""Errors that a user can cause and mend.

Each message is one line that says what is wrong, where (file, key or value), and what would be
right. The command line prints it and exits with code 2; everything else that is raised is a
fault of the caller's program or of ours.
"""


class UserError(ValueError):
    """Something that the user gave cannot be used; the message says what, where and the remedy."""


class CheckpointError(UserError):
    """A file cannot be read as the checkpoint that it claims to be."""


class TruncatedError(CheckpointError):
    """A file ends before what its header promises."""


class ConfigError(UserError):
    """A configuration describes no decoder."""
