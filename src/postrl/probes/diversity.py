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


def hill_number(counts: Sequence[int], order: float) -> float:
    """D_q = (Σ p_i^q)^(1/(1−q)) of shares p_i: the number of equally frequent kinds that are as diverse.

    Order 0 counts the kinds, 1 is e to the entropy, 2 is 1 / Σ p². Hill, "Diversity and Evenness", Ecology 54 (1973).
    nan without observations.
    """
    seen = [count for count in counts if count]
    if not seen:
        return math.nan
    shares = [count / sum(seen) for count in seen]
    if order == 1:
        return math.exp(-sum(share * math.log(share) for share in shares))
    return sum(share**order for share in shares) ** (1 / (1 - order))


def rarefied(counts: Sequence[int], k: int) -> float:
    """Expected number of kinds among k observations drawn without replacement: Σ_i 1 − C(N−n_i, k) / C(N, k).

    The way to compare variety between samples of different size: at the same k (Hurlbert, Ecology 52 (1971)). nan if
    there are fewer than k observations.
    """
    total = sum(counts)
    if k > total:
        return math.nan
    return sum(1 - math.comb(total - count, k) / math.comb(total, k) for count in counts)
