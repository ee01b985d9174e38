"""How different a policy's answers are from one another."""

import math
from collections import Counter
from collections.abc import Sequence


def distinct(texts: Sequence[str]) -> int:
    """How many different texts there are."""
    return len(set(texts))


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Different n-grams of words divided by all n-grams of words, over all texts together; nan if there is none.

    Distinct-n of Li et al., arXiv 1510.03055, section 5. Texts of fewer than n words have no n-gram. It falls with the
    amount of text, so compare it only between equally many samples.
    """
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def answer_entropy(answers: Sequence[str]) -> float:
    """Entropy (nats) of the empirical distribution of the answers: 0 if all agree, log(count) if none do.

    The plug-in estimate, which lies below the true entropy when there are few answers; nan without answers.
    """
    if not answers:
        return math.nan
    shares = [count / len(answers) for count in Counter(answers).values()]
    return -sum(share * math.log(share) for share in shares) + 0.0
