r"""The task: grade-school word problems (GSM8K), graded by their last line. No torch in here.

One raw row, and the prompt made from it (the model goes on behind it):
    {"question": "Tom has 3 pens. He buys 4 more. How many?", "answer": "3+4=<<3+4=7>>7\n#### 7"}
    -> "Question: Tom has 3 pens. He buys 4 more. How many?\nAnswer:\n"
The answer rule: the last `####` decides, and the number comes first after it. The reward:
    completion      gold  reward           completion          gold  reward
    "#### 7"        7     1                "7"                 7     0   no marker
    "#### $7.00."   7     1                "#### 7\n#### 8"    7     0   the last marker decides
    "#### 1,000"    1000  1                "#### 7 or 8"       7     0   a hedge
    "#### 7 pens"   7     1                "#### 14/2"         7     0   not worked out
    python gsm8k.py   # prints three home-made problems, with a careful and a careless answer each
"""
import collections
import contextlib
import functools
import json
import pathlib
import random
import re
import zlib
from fractions import Fraction

import tiktoken

# --- The grader: no int(), float() or eval on a model's text, but one anchored pattern ----------

ASCII = str.maketrans("０１２３４５６７８９，．＄％－\u2212\u00a0\u202f\u2009", "0123456789,.$%--   ")
ANSWER = re.compile(
    r"(?:([+-]?)(?:\\?[$€£] ?)?|\\?[$€£] ?([+-]))"              # one sign, maybe a currency
    r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.([0-9]*))?%?"
    r"(?=[ \t\r.,;:!?)$<]|\Z)")                                 # and there the number ends


def _canonical(line):
    """The number that opens `line` as a canonical string ("1,050.0" -> "1050"), or None."""
    line = line.lstrip(" \t\r\u00a0\u202f\u2009")
    match = ANSWER.match(line[:80].translate(ASCII))
    # A second number is a hedge. set(), because the line may be a megabyte long.
    if not match or match.end() > 64 or any(map(str.isnumeric, set(line[match.end():]))):
        return None
    sign, sign_after_currency, whole, decimals = match.groups(default="")
    number = whole.replace(",", "").replace(" ", "").lstrip("0") or "0"
    number = f"{number}.{decimals}".rstrip("0").rstrip(".")
    return "-" + number if "-" in (sign, sign_after_currency) and number != "0" else number


def gold_answer(text):
    """The gold of a number or of a full answer text as a canonical string, or a loud ValueError."""
    if isinstance(text, str):
        _, marker, rest = text.rpartition("####")
        number = _canonical(rest.partition("\n")[0] if marker else rest.strip())
        if number is not None and (marker or not re.search("[A-Za-z]", text)):
            return number
    raise ValueError(f"no readable gold in {str(text)[-60:]!r}: it must end in '#### NUMBER'")


def grade(completion, gold):
    """1 if the number after the last `####` of `completion` equals `gold`, else 0 (see above)."""
    gold = gold_answer(gold)
    _, marker, rest = completion.rpartition("####")
    return int(bool(marker) and _canonical(rest.partition("\n")[0]) == gold)


# --- The data ------------------------------------------------------------------------------------

def prompt(question):       # encoded apart from the answer, so that no token spans the two
    return f"Question: {question}\nAnswer:\n"


def load(split, source=None):
    """Split "train" or "test" as [{"question": str, "answer": str}]: source None is openai/gsm8k on
    Hugging Face, else a folder with SPLIT.jsonl, or "builtin" (home-made, always the same).
    Raises ConnectionError, FileNotFoundError or ValueError, and names the remedy.
    """
    remedy = "use --data FOLDER with train.jsonl and test.jsonl in it, or --data builtin"
    if source == "builtin":
        rng = random.Random(split)                              # a string seed is not salted
        return [fresh(split, rng) for _ in range(512 if split == "test" else 2048)]
    if source is None:
        try:
            from datasets import load_dataset
            return list(load_dataset("openai/gsm8k", "main", split=split))
        except Exception as error:                              # datasets raises many types
            raise ConnectionError(f"openai/gsm8k: {type(error).__name__}; {remedy}") from error
    path = pathlib.Path(source, f"{split}.jsonl")
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if not lines:
        raise FileNotFoundError(f"{path} does not exist or is empty: {remedy}")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            gold_answer(row["answer"])
            rows.append({"question": row["question"].strip(), "answer": row["answer"]})
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} line {number} needs texts 'question' and 'answer' in a JSON "
                             f"object: mend or remove it ({error!r})") from None
    return rows


def fresh(split, rng, pool=None):
    """A fresh problem: home-made, or a random row of `pool` renumbered. rng: random.Random.
    A hash of the text holds out an eighth for "test", so the two splits can never meet."""
    for _ in range(0 if pool == [] else 2000):                  # no row: straight to the error
        problem = _home_made(rng) if pool is None else renumber(rng.choice(pool), rng)
        if problem:
            held_out = zlib.crc32(problem["question"].encode("utf-8", "replace")) % 8 == 0
            if held_out == (split == "test"):
                return problem
    raise ValueError(f"none of {len(pool)} rows could be given fresh numbers: use --data builtin")


# --- The chain <<expression=result>> of an answer, in exact arithmetic ---------------------------

NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]*\.[0-9]+|[0-9]+")
ANNOTATION = re.compile("<<(N(?: ?[-+*/] ?N)*)=(N)>>".replace("N", f"(?:{NUMBER.pattern})"))
ANNOTATION_OR_NUMBER = re.compile(f"{ANNOTATION.pattern}|{NUMBER.pattern}")
OPERATIONS = {"+": Fraction.__add__, "-": Fraction.__sub__,
              "*": Fraction.__mul__, "/": Fraction.__truediv__}
NOT_EXACT = (ValueError, ArithmeticError)


def _exact(number):                                             # "1,050.5" -> Fraction(2101, 2)
    return Fraction(number.replace(",", ""))


def calculate(expression):
    """The exact value of an expression as ANNOTATION has it: "9-2*3" -> Fraction(3)."""
    # What is done last splits it: the last + or -, then the last * or /.
    split = re.fullmatch("(.+)([-+])(.+)", expression) or re.fullmatch("(.+)([*/])(.+)", expression)
    if not split:
        return _exact(expression)
    left, operator, right = split.groups()
    return OPERATIONS[operator](calculate(left), calculate(right))


def _rewrite(text, new):
    """`text` with its numbers replaced as in `new` {old: new}, and each step calculated afresh.
    The number of decimals stays, so integers stay integers; one of NOT_EXACT where it cannot."""
    new = dict(new)                                             # grows by the results

    def swap(match):
        expression, result = match.groups()                     # None, None outside << >>
        like = result or match[0]
        old = _exact(like)
        if expression:
            expression = ANNOTATION_OR_NUMBER.sub(swap, expression)
            new[old] = calculate(expression)
        value = new.get(old, old)
        decimals = len(like.partition(".")[2])
        shown = like if value == old else f"{float(value):,.{decimals}f}"
        if _exact(shown) != value or value < min(old, 2):       # "1 pens", or none, is no good
            raise ValueError(f"{value} has more than {decimals} decimals, or is too small")
        shown = shown if "," in like else shown.replace(",", "")
        return f"<<{expression}={shown}>>" if expression else shown

    return ANNOTATION_OR_NUMBER.sub(swap, text)


# --- Renumbering: one row becomes many (the idea of GSM-Symbolic, arXiv 2410.05229) --------------
# Integers that question and chain share get new values, round ones round ones. All else stays, and
# a row is refused if a value has two meanings or none. Words mean values, too: a week may be a 7.

MEANINGS = {
    2: "two|twice|double|pair|couple|both|half|halve|halves|weekend", 3: "three|third|triple|yard",
    4: "four|quarter|month|square", 5: "five|fifth|weekday", 6: "six", 7: "seven|week|day",
    8: "eight", 9: "nine", 10: "ten", 11: "eleven", 12: "twelve|dozen|year|month|foot|feet|annual",
    16: "pound|ounce", 20: "twenty", 24: "day|daily|hour", 30: "thirty|month", 50: "fifty|half",
    52: "year|week|annual", 60: "hour|minute|second", 100: "hundred|cent|meter|century",
    365: "year|day", 1000: "thousand|kg|kilogram|kilometer|gram|liter", .5: "half", .25: "quarter",
}
# What is no free quantity: May 5, 3/4, $1.50, 1st, 20%, 5 pm, 2 and a half, 4 legs, 24 hours.
STAYS_BEFORE = re.compile(r"[\w/:#^.-]$|\b[A-Z][a-z]+ $|[0-9] $")
STAYS_AFTER = re.compile(r"[A-Za-z/:^]|[ -]?(?:%|percent|[0-9]|[ap]\.?m\b|o'clock|and a half"
                         r"|legs?\b|wheel|tire|side|cent|second|minute|hour|day|week|month)")


@functools.cache
def _choices(question, answer):
    """{number of the question: its possible new values}, or {} for a row that is refused."""
    meant = {1} | {value for value, words in MEANINGS.items()
                   if re.search(rf"(?i)\b(?:{words})(?:s|d|th|ly)?\b", question + answer)}
    choices = {}
    for match in NUMBER.finditer(question):
        value, before, after = _exact(match[0]), question[:match.start()], question[match.end():]
        if re.match(" ?%| percent", after):                     # 80% is spent as .8 or 20 as well
            shares = {1, 100, value, 100 - value, 100 + value}
            meant |= shares | {share / Fraction(100) for share in shares}
        if "." in match[0] or STAYS_BEFORE.search(before) or STAYS_AFTER.match(after):
            meant.add(value)
        unit = next((u for u in (1000, 100, 10, 5) if value % u == 0 and value >= 4 * u), 1)
        choices[value] = range(value // 2 // unit * unit + unit, 2 * int(value) + 1, unit)
    known, used, result = meant | set(choices), set(), None
    # Sure is a row whose numbers all come from somewhere, each with one meaning, all recalculated.
    sure = not re.search("=[ $]*[0-9.]", ANNOTATION.sub("<<", answer))
    for match in ANNOTATION_OR_NUMBER.finditer(answer):
        expression = match[1]
        numbers = {_exact(number) for number in NUMBER.findall(expression or match[0])}
        sure = sure and numbers <= known
        if expression:
            used |= numbers
            result = _exact(match[2])
            is_last = "<<" not in answer[match.end():]
            sure = sure and calculate(expression) == result and (result not in known or is_last)
            known.add(result)
    if not sure or _exact(gold_answer(answer)) != result:
        return {}
    return {value: values if value in used - meant else [value]
            for value, values in sorted(choices.items())}


def renumber(problem, rng):
    """The problem with fresh numbers of similar size, in the same order; None where unsure."""
    with contextlib.suppress(*NOT_EXACT):
        choices = _choices(problem["question"], problem["answer"])
        for _ in range(100 if choices else 0):
            new = {value: rng.choice(values) for value, values in choices.items()}
            drawn = list(new.values())
            if drawn == sorted(set(drawn)) and drawn != list(new):
                with contextlib.suppress(*NOT_EXACT):           # mostly a division: draw again
                    answer = _rewrite(problem["answer"], new)
                    return {"question": _rewrite(problem["question"], new), "answer": answer}
    return None


# --- Home-made problems, and the answers to warm up on -------------------------------------------

PEOPLE = {"Tom": "He", "Ann": "She", "Ben": "He", "Mia": "She", "Sam": "He", "Eva": "She"}
THINGS = "apples coins cards books pens shells eggs cookies stamps balls".split()
VERBS = {"+": ["buys", "finds", "gets", "wins"], "-": ["loses", "sells", "gives away", "drops"]}


def _home_made(rng):
    """1 to 3 steps, numbers 2 to 9, results 1 to 30; no number equals an earlier result."""
    name, things, total = rng.choice(list(PEOPLE)), rng.choice(THINGS), rng.randint(2, 9)
    he, length = PEOPLE[name], rng.choice((1, 2, 2, 3, 3))
    story = [f"{name} {rng.choice(('has', 'starts with'))} {total} {things}."]
    steps = []                                                  # (expression, result)
    if rng.random() < 0.2:
        bags = rng.randint(2, min(9, 30 // total))
        story = [f"{name} has {bags} bags with {total} {things} each."]
        steps, total = [(f"{bags}*{total}", bags * total)], bags * total
    while len(steps) < length:
        sign, number = rng.choice("+---"), rng.randint(2, 9)
        result = total + number if sign == "+" else total - number
        if 1 <= result <= 30 and number not in [earlier for _, earlier in steps]:
            who = rng.choice((he, f"Then {he.lower()}"))
            story.append(f"{who} {rng.choice(VERBS[sign])} {number}.")
            steps.append((f"{total}{sign}{number}", result))
            total = result
    story.append(f"How many {things} does {name} have {rng.choice(('now', 'in the end'))}?")
    lines = [f"{step}=<<{step}={result}>>{result} {things}." for step, result in steps]
    return {"question": " ".join(story), "answer": "\n".join([*lines, f"#### {total}"])}


def demonstration(problem, rng, sloppy=0.0):
    """An answer to warm up on; with probability `sloppy` a careless one, if there is any: well
    calculated but wrong, its last step skipped, or + done for -. RL can mend that."""
    careful, careless = problem["answer"], []
    if rng.random() >= sloppy:
        return careful
    skipped = careful.rpartition("<<")[0].rpartition("\n")[0]   # the lines above the last step
    if steps := ANNOTATION.findall(skipped):
        careless.append(f"{skipped}\n#### {steps[-1][1]}")
    for step, _ in ANNOTATION.findall(careful):
        plus = step.replace("-", "+")
        added = careful.replace(f"{step}=<<{step}=", f"{plus}=<<{plus}=", 1)
        with contextlib.suppress(*NOT_EXACT):
            careless += [_rewrite(added, {})] if added != careful else []
    careless = [answer for answer in careless if gold_answer(answer) != gold_answer(careful)]
    # Mostly the first kind: it must be more likely than careful work, or there is nothing to mend.
    return careless[0] if careless and rng.random() < 0.8 else rng.choice(careless or [careful])


# --- The tokenizer: byte-level BPE, digits one by one --------------------------------------------

PATTERN = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+\n?|\s"
END = "<|end|>"                                                 # last id; ends answers, and pads


def train_tokenizer(texts, vocab_size):
    """A tiktoken.Encoding of at most `vocab_size` (257 or more) entries: all bytes, the most
    frequent pairs merged one by one, END as the last id. (encode_ordinary reads END as text.)"""
    counts = collections.Counter(word for text in texts for word in re.findall(PATTERN, text))
    words = [[bytes([byte]) for byte in word.encode("utf-8", "replace")] for word in counts]
    counts, tokens = list(counts.values()), [bytes([byte]) for byte in range(256)]
    pairs, where = collections.Counter(), collections.defaultdict(set)

    def count(i, sign):                                         # the neighbours in word i
        for pair in zip(words[i], words[i][1:]):
            pairs[pair] += sign * counts[i]
            where[pair].add(i)

    for i in range(len(words)):
        count(i, 1)
    while len(tokens) < vocab_size - 1 and (top := max(pairs.values(), default=0)) > 1:
        left, right = best = max(pair for pair, n in pairs.items() if n == top)
        if left + right not in tokens:                          # "ab" "c" after "a" "bc"
            tokens.append(left + right)
        for i in where.pop(best):
            count(i, -1)
            merged = []
            for token in words[i]:
                if merged and (merged[-1], token) == best:
                    merged[-1] = left + right
                else:
                    merged.append(token)
            words[i] = merged
            count(i, 1)
    return tokenizer_from_json(json.dumps([token.decode("latin-1") for token in tokens]))


def tokenizer_to_json(tokenizer):                               # to keep it in a checkpoint
    tokens = map(tokenizer.decode_single_token_bytes, range(tokenizer.n_vocab - 1))
    return json.dumps([token.decode("latin-1") for token in tokens])


def tokenizer_from_json(text):
    """The tokenizer with the same ids."""
    ranks = {token.encode("latin-1"): rank for rank, token in enumerate(json.loads(text))}
    return tiktoken.Encoding("quads", pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens={END: len(ranks)})


if __name__ == "__main__":
    rng = random.Random(0)
    for problem in [fresh("train", rng) for _ in range(3)]:
        print(prompt(problem["question"]) + demonstration(problem, rng))
        print(f"careless: {demonstration(problem, rng, sloppy=1.0)!r}\n")
