"""Random words, names, numbers and strings. A tenth of the words is kept for the held-out sets."""

from __future__ import annotations

import random
import re
import string
import zlib
from collections import defaultdict

from tools.demo_model.conversations.facts import FACTS

NOUNS = """apple river stone garden window table chair bottle paper pencil letter market village
mountain forest valley island harbor bridge castle tower temple palace street corner kitchen
bedroom ceiling carpet mirror candle basket blanket pillow hammer ladder bucket shovel engine
wheel rocket satellite planet comet galaxy signal cable switch router socket packet buffer thread
process kernel module compiler parser token vector matrix tensor number circle square triangle
pyramid cylinder pattern color shadow light thunder lightning storm cloud rain snow winter summer
spring autumn morning evening night season farmer baker doctor teacher student painter writer
sailor pilot driver singer dancer actor soldier judge lawyer banker tailor hunter fisher shepherd
horse rabbit tiger lion zebra camel donkey goat sheep chicken turkey eagle falcon sparrow pigeon
raven salmon trout shark whale dolphin turtle lizard snake spider beetle butterfly cricket alder
birch maple willow cedar walnut hazel juniper laurel magnolia orchid tulip daisy violet clover
fern moss ivy bamboo cotton linen velvet leather copper silver iron bronze marble granite amber
coral pearl ruby emerald sapphire opal topaz coffee pepper ginger garlic onion tomato carrot
potato lemon orange banana cherry melon grape berry honey butter cheese bread sugar vinegar
soup salad dinner breakfast journey ticket station airport luggage passport museum library theater
concert guitar violin trumpet piano drum melody rhythm story novel poem chapter page sentence
question answer problem reason result method lesson project report meeting office company budget
invoice contract account wallet coin treasure secret puzzle riddle magic dragon wizard knight
giant fairy ghost crown sword shield arrow banner anchor compass lantern needle ribbon button
pocket jacket sweater glove scarf helmet saddle barrel wagon tunnel canal meadow desert glacier
volcano lagoon canyon prairie orchard vineyard cottage chimney fountain statue""".split()

VERBS = """opens closes finds carries watches follows builds breaks paints cleans moves holds
drops lifts pushes pulls reads writes sends brings takes gives keeps loses hides shows tells asks
hears sees likes wants needs buys sells makes fixes paints cuts folds turns stops starts counts
measures checks signs prints copies stores sorts joins splits guards visits leaves""".split()

ADJECTIVES = """red blue green yellow white black brown gray small large tiny huge old new young
quiet loud quick slow warm cold bright dark soft hard heavy light clean dirty empty full open
closed round flat sharp smooth rough sweet bitter fresh dry wet strong weak rich poor happy sad
brave calm clever gentle honest kind lazy proud rare simple strange tall wide wild wise""".split()

NAMES = """Ada Alan Alice Amir Ana Anton Bella Bob Carla Carlos Chen Clara Dana David Diego Elena
Elias Emma Eric Eva Farah Felix Fiona Frank Grace Hana Hector Helen Henry Hugo Ida Igor Ines Iris
Ivan Jack Jana Jonas Julia Kai Karl Kira Lara Lars Leo Lena Lily Linus Lucas Luis Maja Marco Maria
Marta Max Mia Milo Mona Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul Petra Pia Rafael Rosa
Ruth Sam Sara Sofia Sven Tara Theo Tina Tom Vera Victor Walter Wanda Xavier
Yara Yusuf Zoe""".split()

CITIES = """Paris London Berlin Madrid Rome Vienna Prague Oslo Stockholm Helsinki Copenhagen Dublin
Lisbon Athens Warsaw Budapest Zurich Geneva Munich Hamburg Milan Naples Lyon Brussels Amsterdam
Boston Chicago Denver Seattle Austin Dallas Houston Miami Atlanta Toronto Montreal Vancouver Lima
Bogota Santiago Quito Havana Cairo Nairobi Lagos Accra Tunis Dakar Mumbai Delhi Bangkok Hanoi
Manila Jakarta Tokyo Osaka Kyoto Seoul Beijing Shanghai Sydney Melbourne Perth Auckland""".split()

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl st t th tr v w z"
)
_VOWELS = "a e i o u ai ea ee ie oa oo ou"
_CODAS = "b ck d ft g ll lm m mp n nd ng nt p r rd rk rn s sh sk st t th x"
ONSETS, VOWELS, CODAS = _ONSETS.split(), _VOWELS.split(), _CODAS.split()

UNICODE_SAMPLES = (
    "éèêëàâçñöüßøåæœíóúýžšč",
    "абвгдежзийклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "日本語中文字東京大学生山川水火木金土人口手目耳",
    "안녕하세요한국어나라사람",
    "שלוםעבריתمرحباالعربية",
    "😀😂🙂🎉🚀🔥🌍🐍🍎⭐✅❌",
    "€£¥§±×÷≤≥≠→←↑↓∞√°•…–—“”‘’",
)


def is_held_out(word: str) -> bool:
    """Return whether a word belongs to the tenth of all words that the training never uses."""
    # The prompts use "question" themselves, so it cannot be held out.
    return word != "question" and zlib.crc32(word.lower().encode()) % 10 == 0


def _followers() -> dict[str, str]:
    """Return the letters that follow two letters in training words; "^" is a start, "$" an end."""
    known = [
        word
        for pool in (NOUNS, VERBS, ADJECTIVES, NAMES, CITIES)
        for word in pool
        if not is_held_out(word)
    ]
    known += re.findall("[A-Za-z]+", " ".join(fact.answer for fact in FACTS))
    table: dict[str, str] = defaultdict(str)
    for word in known:
        padded = f"^^{word.lower()}$"
        for at in range(len(padded) - 2):
            table[padded[at : at + 2]] += padded[at + 2]
    return table


FOLLOWERS = _followers()


class TextSource:
    """Random numbers, words and texts; equal seeds and splits give equal ones.

    Args:
        seed: seed of the random numbers.
        split: "train" for words of the training, "held_out" for the words kept from it.

    Raises:
        ValueError: when `split` is neither.
    """

    def __init__(self, seed: int | str, split: str = "train") -> None:
        if split not in ("train", "held_out"):
            raise ValueError(f"unknown split {split!r}")
        # A string seed keeps the two splits apart even for equal numbers.
        self.rng = random.Random(f"{split}/{seed}")
        self.split = split
        self._pools: dict[int, list[str]] = {}

    def pick(self, pool: list[str]) -> str:
        """Return one random word of the list `pool` that belongs to this source's split."""
        mine = self._pools.get(id(pool))
        if mine is None:
            held = self.split == "held_out"
            mine = [word for word in pool if is_held_out(word) == held]
            self._pools[id(pool)] = mine
        return mine[int(self.rng.random() * len(mine))]

    def integer(self, low: int, high: int) -> int:
        """Return a random number of low..high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.rng.random() < probability

    def noun(self) -> str:
        """Return a random noun or, in 3 of 10 cases, an invented word."""
        return self.invented() if self.chance(0.3) else self.pick(NOUNS)

    def invented(self) -> str:
        """Return a random word of no language: pieces of real words, or one to three syllables.

        The pieces use every token of the vocabulary, so that the model learns the spelling of
        each: a word has other tokens after a space than after a quote.
        """
        form = self.integer(0, 5)
        if form == 0:
            return "".join(self._piece() for _ in range(self.integer(1, 3)))
        if form <= 3:
            return self._likely_word()
        choice = self.rng.choice
        parts = [choice(ONSETS) + choice(VOWELS) for _ in range(self.integer(1, 3))]
        return "".join(parts) + choice(CODAS)

    def _likely_word(self) -> str:
        """Return letters that follow each other as in English, never a held-out word."""
        word = "^^"
        while word[-1] != "$" and len(word) < 14:
            word += self.rng.choice(FOLLOWERS[word[-2:]])
        word = word.strip("^$")
        return word if len(word) > 1 and not is_held_out(word) else self._piece()

    def _piece(self) -> str:
        """Return one to seven letters from a word of this split."""
        word = self.pick(self.rng.choice((NOUNS, VERBS, ADJECTIVES, NAMES, CITIES))).lower()
        start = self.integer(0, max(0, len(word) - 2)) if self.chance(0.6) else 0
        return word[start : start + self.integer(1, 7)]

    def name(self) -> str:
        """Return a random first name, real or invented."""
        return self.invented().capitalize() if self.chance(0.25) else self.pick(NAMES)

    def city(self) -> str:
        """Return a random name of a city, real or invented."""
        return self.invented().capitalize() if self.chance(0.25) else self.pick(CITIES)

    def digits(self, low: int = 1, high: int = 6) -> str:
        """Return a random number of `low` to `high` digits, without a leading zero."""
        length = self.integer(low, high)
        return str(self.integer(1, 9)) + "".join(str(self.integer(0, 9)) for _ in range(length - 1))

    def letters(self, low: int = 3, high: int = 10) -> str:
        """Return `low` to `high` random letters, digits and signs, as in an identifier."""
        alphabet = self.rng.choice(
            (
                string.ascii_lowercase,
                string.ascii_letters,
                string.ascii_lowercase + string.digits,
                string.ascii_uppercase + string.digits,
                string.hexdigits[:16],
                string.ascii_letters + string.digits + "-_.",
            )
        )
        return "".join(self.rng.choice(alphabet) for _ in range(self.integer(low, high)))

    def unicode(self, low: int = 1, high: int = 8) -> str:
        """Return `low` to `high` random characters of one foreign alphabet, or emoji or signs."""
        sample = self.rng.choice(UNICODE_SAMPLES)
        return "".join(self.rng.choice(sample) for _ in range(self.integer(low, high)))

    def sentence(self) -> str:
        """Return a random simple English sentence."""
        form = self.integer(0, 4)
        a, b, verb = self.noun(), self.noun(), self.pick(VERBS)
        if form == 0:
            text = f"the {self.pick(ADJECTIVES)} {a} {verb} the {b}."
        elif form == 1:
            text = f"{self.name()} {verb} a {a} near the {self.pick(ADJECTIVES)} {b}."
        elif form == 2:
            text = f"every {a} in {self.city()} is {self.pick(ADJECTIVES)}."
        elif form == 3:
            text = f"there are {self.digits(1, 3)} {self.pick(ADJECTIVES)} {a}s behind the {b}."
        else:
            text = f"a {a} {verb} the {b}, and the {self.noun()} is {self.pick(ADJECTIVES)}."
        return text[0].upper() + text[1:]
