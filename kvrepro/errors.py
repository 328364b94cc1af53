"""The one exception that means: the user can mend this.

Its message is one line (what, why, what to do). The command line prints it and exits with code 2; everything else
that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno


class UserError(ValueError):
    """Bad input, a missing file or an unsupported request; the message is one line for a person."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: Python's, the system's, or torch's on CPU or GPU.

    torch has an exception of its own for a GPU only; its CPU allocator raises RuntimeError.

    Examples
    --------
    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1376256 bytes."))
    True
    >>> out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    False
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    signs = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
