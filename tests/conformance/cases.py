"""The answers that trainers are compared on (postrl.conformance.cases), under the name the tests say."""

from postrl.conformance.cases import (
    EOS,
    GROUPS,
    SIZE,
    Answer,
    Case,
    Done,
    make_case,
    near,
    our_updates,
    stopping,
)

__all__ = ["EOS", "GROUPS", "SIZE", "Answer", "Case", "Done", "make_case", "near", "our_updates", "stopping"]
