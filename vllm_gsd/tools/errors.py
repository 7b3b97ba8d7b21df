"""What the commands refuse."""


class ToolError(ValueError):
    """A command cannot do what it was asked. The message is one sentence, which the command prints."""
