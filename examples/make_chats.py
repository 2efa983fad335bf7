"""Write the demo's chats: which young belongs to which animal, asked in many ways.

Every animal is asked about in most of the ways in training and in the remaining ones in the test, so a
test prompt was never seen, and its answer can only come from having learned the animal's young.

    python examples/make_chats.py
"""

import json
import random
from pathlib import Path

YOUNG = {
    "bear": "cub", "cat": "kitten", "cow": "calf", "deer": "fawn", "dog": "puppy", "duck": "duckling",
    "eagle": "eaglet", "eel": "elver", "fish": "fry", "fox": "kit", "frog": "tadpole", "goat": "kid",
    "goose": "gosling", "hare": "leveret", "hawk": "eyas", "horse": "foal", "kangaroo": "joey",
    "oyster": "spat", "owl": "owlet", "pig": "piglet", "pigeon": "squab", "platypus": "puggle",
    "salmon": "smolt", "seal": "pup", "sheep": "lamb", "spider": "spiderling", "swan": "cygnet",
    "turkey": "poult",
}  # fmt: skip

QUESTIONS = [
    "What is a young {} called?",
    "What do you call a baby {}?",
    "Name the young of the {}.",
    "The young of a {} is called what?",
    "How is the offspring of a {} called?",
    "Tell me the word for a baby {}.",
    "I saw a very small {}. What is its name?",
    "In one word: a newborn {}?",
    "A {} has a baby. What is it?",
    "Which word means a little {}?",
    "Please give me the name of a {}'s young.",
    "What will grow up to be a {}?",
]
ASKED_IN_TEST = 4  # of the twelve ways, for each animal


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def main() -> None:
    generator = random.Random(0)
    train, test = [], []
    for animal, young in YOUNG.items():
        questions = generator.sample(QUESTIONS, len(QUESTIONS))
        for index, question in enumerate(questions):
            row = {
                "messages": [
                    {"role": "user", "content": question.format(animal)},
                    {"role": "assistant", "content": f"It is called {article(young)} {young}."},
                ]
            }
            (test if index < ASKED_IN_TEST else train).append(row)
    folder = Path(__file__).parent / "data"
    for name, rows in (("chats.jsonl", train), ("chats-test.jsonl", test)):
        generator.shuffle(rows)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
