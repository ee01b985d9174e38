"""The module that verl imports: importing it registers the shelf. Nothing else does."""

from postrl.adapters.verl_plugin import register

register()
