"""The one exception type for mistakes that the user can mend.

Everything below the command line raises it with a message of one line that says what was got, what was expected and the
next step; `bertkit.cli` turns it into that line and exit code 2. A bug stays an ordinary exception with a traceback.
"""


class UsageError(ValueError):
    """A wrong file, option, recipe or text; its message is one line that names the thing and the remedy."""
