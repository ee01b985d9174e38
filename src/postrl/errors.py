"""What goes wrong in a user's hands."""


class UserError(Exception):
    """Bad input or a broken surrounding.

    The message is one sentence that names the option, file or item and what to do; the command line prints it without
    a traceback and exits with 2.
    """
