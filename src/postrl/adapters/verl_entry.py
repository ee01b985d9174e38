"""The module that verl imports: importing it, where there is a verl, registers the shelf. Nothing else does."""

from importlib.util import find_spec

from postrl.adapters.verl_plugin import register

if find_spec("verl") is not None:
    register()
