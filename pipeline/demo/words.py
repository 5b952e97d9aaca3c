"""Values in reports: closed lists, and open-ended names and codes.

The hash of an open-ended value assigns it to a split. A name or part code of the training reports therefore never
occurs in the held-out or job reports, however many are generated.
"""

from hashlib import blake2b
from random import Random
from typing import Literal, get_args

Split = Literal["train", "heldout", "job"]
SPLITS: tuple[Split, ...] = get_args(Split)

# fmt: off
SYLLABLES = (  # each starts with a consonant, so that tokenization of names does not depend on context
    "ka", "mo", "ra", "del", "vin", "tor", "bel", "nu", "sa", "lo", "mi", "fen", "gar", "pol",
    "zi", "ta", "ren", "du", "kor", "va", "les", "ni", "pra", "ho", "jin", "ba", "tel", "ru",
    "sol", "pe", "min", "dar", "gu", "lan", "vo", "ki", "bru", "hel", "tam", "so",
)
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)
DEVICES = (
    "pump", "boiler", "chiller", "compressor", "conveyor", "elevator", "furnace", "generator", "heater",
    "mixer", "press", "scanner",
)
FAULTS = (
    "low pressure", "no power", "loud noise", "an oil leak", "high temperature", "strong vibration",
    "slow start", "a blocked line", "a burnt smell", "a false alarm", "weak flow", "a cracked cover",
)
CAUSES = (
    "a worn seal", "a loose wire", "a dirty filter", "a broken belt", "a failed sensor", "a stuck valve",
    "a bent shaft", "a dry bearing", "water damage", "a blown fuse", "wrong settings", "a corroded joint",
)
ACTIONS = (
    "replaced the seal", "repaired the wiring", "cleaned the filter", "changed the belt",
    "swapped the sensor", "freed the valve", "aligned the shaft", "greased the bearing", "dried the housing",
    "reset the controller", "tightened the joint", "flushed the system",
)
# fmt: on


def split_of(value: str) -> Split:
    """Return the split of an open-ended value: 8 of 10 train, 1 held out, 1 for the demonstration job."""
    bucket = blake2b(value.encode(), digest_size=4).digest()[0] % 10
    return "heldout" if bucket == 0 else "job" if bucket == 1 else "train"


def name(rng: Random, split: Split) -> str:
    """Return a random capitalized name of two or three syllables that belongs to `split`."""
    while True:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()
        if split_of(word) == split:
            return word


def part_code(rng: Random, split: Split) -> str:
    """Return a random part code of a syllable and three digits, such as `Kel-482`, that belongs to `split`."""
    while True:
        code = f"{rng.choice(SYLLABLES).capitalize()}-{rng.randint(100, 999)}"
        if split_of(code) == split:
            return code


def date(rng: Random) -> str:
    """Return a random day of the year, month first."""
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"
