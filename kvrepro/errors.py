"""The one exception that means: the user can mend this.

Its message is one line (what, why, what to do). The command line prints it and exits with code 2; everything else
that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations


class UserError(ValueError):
    """Bad input, a missing file or an unsupported request; the message is one line for a person."""
