"""The module that verl imports: importing it, where there is a verl, registers the shelf. Nothing else does."""

import traceback
from importlib.util import find_spec

if find_spec("verl") is not None:
    try:
        from postrl.adapters.verl_plugin import register

        register()
    except Exception:  # verl would hide it
        traceback.print_exc()
        raise
