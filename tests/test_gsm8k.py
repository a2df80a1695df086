"""Tests of gsm8k.py; no network.   python -m pytest -q tests/test_gsm8k.py

gsm8k_sample.jsonl: 40 rows of GSM8K (Cobbe et al. 2021, github.com/openai/grade-school-math, MIT
licence). GSM8K_DIR=FOLDER (with train.jsonl and test.jsonl) adds the tests on all 8,792 rows."""
import collections
import json
import os
import pathlib
import random
import re
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import gsm8k

CASES = [json.loads(line) for line in open(HERE / "grader_cases.jsonl", encoding="utf-8")]
SAMPLE = [json.loads(line) for line in open(HERE / "gsm8k_sample.jsonl", encoding="utf-8")]
HOME_MADE = gsm8k.load("train", "builtin")[:400]
full_data = pytest.mark.skipif("GSM8K_DIR" not in os.environ,
                               reason="set GSM8K_DIR to a folder with GSM8K's train and test.jsonl")

def values(text):
    return [gsm8k._exact(number) for number in gsm8k.NUMBER.findall(text)]

def chain_is_exact(answer):
    """Every step is right, the number after >> repeats its result, the gold is the last result."""
    parts = gsm8k.ANNOTATION.split(answer)
    for expression, result, after in zip(parts[1::3], parts[2::3], parts[3::3]):
        shown = re.match(r"\$?(" + gsm8k.NUMBER.pattern + ")", after)
        told = [result] + ([shown[1]] if shown else [])
        if {gsm8k._exact(number) for number in told} != {gsm8k.calculate(expression)}:
            return False
    return len(parts) > 1 and gsm8k.gold_answer(answer) == gsm8k.gold_answer(parts[-2])

# ---- grader ----

@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
def test_grader_case(case):
    assert gsm8k.grade(case["completion"], case["gold"]) == case["reward"]

@pytest.mark.parametrize("unit", ["9", ",", " ", "#", "1,000", "1 000", "####1 ", "-", "$", "½",
                                  "\n", "９", "9\u00a0", "."])
def test_a_megabyte_is_graded_at_once(unit):
    text = unit * (1_000_000 // len(unit))
    for completion in (text, "#### " + text, "#### 1 " + text, "#### 1" + text, text + "#### 7"):
        start = time.perf_counter()
        reward = gsm8k.grade(completion, "7")
        assert time.perf_counter() - start < 0.3            # about 0.02 s on an idle core
        assert reward == int(completion.endswith("#### 7"))

def test_random_completions_never_raise_and_rarely_score():
    rng = random.Random(0)
    alphabet = "0123456789,. \n\t\r#$€-+%\\/e½²٣五\ud800\u2212\u202f<|end|>x"
    for _ in range(20_000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        assert gsm8k.grade("#### " + text, "98765") == int("98765" in text.replace(",", ""))
    # the number as a whole, and nothing else, is what counts
    for _ in range(3000):
        gold, other = rng.randrange(-9999, 9999), rng.randrange(-9999, 9999)
        assert gsm8k.grade(f"so\n#### {other:,}.00 pens", f"{gold}") == int(gold == other)
        assert gsm8k.grade(f"#### {gold:,}", f"x\n#### {gold}") == 1

@pytest.mark.parametrize("gold", ["", "seven", "####", "a\n#### b", "1,00", "7 or 8", None, 7,
                                  "3 pens and no marker", "#### 7\n####"])
def test_an_unreadable_gold_is_loud_whatever_the_completion(gold):
    assert len(CASES) == 60
    for completion in ("#### 7", "", "7"):
        with pytest.raises(ValueError, match="no readable gold"):
            gsm8k.grade(completion, gold)

def test_gold_answer_is_canonical_and_a_number_has_64_characters_at_most():
    assert [gsm8k.grade("#### " + "0" * n + "7", "7") for n in (63, 64)] == [1, 0]
    for text, number in (("1,000", "1000"), ("-0.0", "0"), ("5\n#### -3", "-3"), ("07.50", "7.5")):
        assert gsm8k.gold_answer(text) == number

# ---- home-made problems and splits ----

def test_home_made_problems_are_right_short_and_varied():
    lengths, signs = collections.Counter(), collections.Counter()
    for row in HOME_MADE:
        assert gsm8k.grade(row["answer"], row["answer"]) == 1 and chain_is_exact(row["answer"])
        steps = gsm8k.ANNOTATION.findall(row["answer"])
        lengths[len(steps)] += 1
        results = [gsm8k._exact(result) for _, result in steps]
        assert all(values(code)[1] not in results[:i] for i, (code, _) in enumerate(steps))
        signs.update(sign for code, _ in steps for sign in "+-*" if sign in code)
        assert all(1 <= int(result) <= 30 for _, result in steps)
        given = gsm8k.NUMBER.findall(row["question"])       # every given number is used, 2 to 9
        assert all(2 <= int(x) <= 9 for x in given) and len(given) == len(steps) + 1
    assert all(0.1 < lengths[n] / len(HOME_MADE) < 0.5 for n in (1, 2, 3)) and len(lengths) == 3
    assert 0.38 < signs["-"] / signs.total() < 0.55 and signs["*"] > 20
    assert len({row["question"] for row in HOME_MADE}) > 390

def test_builtin_is_the_same_every_time_and_splits_are_disjoint():
    train, test = gsm8k.load("train", "builtin"), gsm8k.load("test", "builtin")
    assert train == gsm8k.load("train", "builtin") and (len(train), len(test)) == (2048, 512)
    train, test = [row["question"] for row in train], [row["question"] for row in test]
    # a fixed row: the split does not hang on Python's salted hash()
    assert train[0] == gsm8k.fresh("train", random.Random("train"))["question"]
    rng, pool = random.Random(1), SAMPLE
    train += [gsm8k.fresh("train", rng, pool)["question"] for _ in range(200)]
    test += [gsm8k.fresh("test", rng, pool)["question"] for _ in range(100)]
    assert not set(train) & set(test)
    rng = random.Random(2)
    draws = [gsm8k._home_made(rng)["question"] for _ in range(4000)]
    share = sum(gsm8k.zlib.crc32(q.encode()) % 8 == 0 for q in draws) / 4000
    assert 0.1 < share < 0.15                               # an eighth is held out

def test_a_pool_that_cannot_be_renumbered_is_refused():
    bare = [{"question": "How many legs has a dog?", "answer": "Four.\n#### 4"}]
    for pool in (bare, []):
        with pytest.raises(ValueError, match="could be given fresh numbers"):
            gsm8k.fresh("train", random.Random(0), pool)

# ---- renumbering ----

def check_renumbered(old, new):
    assert chain_is_exact(new["answer"]) and new["question"] != old["question"]
    assert gsm8k.grade(new["answer"], new["answer"]) == 1
    for field in ("question", "answer"):                    # only numbers change, no word drifts
        assert gsm8k.NUMBER.sub("#", old[field]) == gsm8k.NUMBER.sub("#", new[field])
    before, after = values(old["question"]), values(new["question"])
    for i in range(len(before)):
        for j in range(i):                                  # order kept, equal numbers stay equal
            assert (before[i] < before[j]) == (after[i] < after[j])
            assert (before[i] == before[j]) == (after[i] == after[j])
    for a, b in zip(before, after):
        assert a == b or (a / 2 <= b <= 2 * a and b >= 2 and a % 1 == b % 1 == 0)
    for code, result in gsm8k.ANNOTATION.findall(new["answer"]):
        assert gsm8k._exact(result) > 0

def test_renumbered_rows_are_consistent():
    done = 0
    for row in SAMPLE:
        for seed in range(20):
            new = gsm8k.renumber(row, random.Random(seed))
            assert new == gsm8k.renumber(row, random.Random(seed))
            if new:
                check_renumbered(row, new)
                done += 1
    assert done > 19 * 20                                   # 21 of the 40 rows can be renumbered

def problem(question, answer):
    return {"question": question, "answer": answer}

def renumbered(row, n=60):
    return [new for seed in range(n) if (new := gsm8k.renumber(row, random.Random(seed)))]

def test_commas_stay_decimals_stay_and_round_numbers_stay_round():
    news = renumbered(problem("A car costs $2,000 and a pen $1.50. What is the total?",
                              "2,000+1.50 = $<<2000+1.5=2001.5>>2,001.50 in all.\n#### 2001.5"))
    assert len(news) > 20
    for new in news:
        assert re.search(r"\$[1-4],[0-9]00 and a pen \$1\.50\.", new["question"])
        assert re.search(r"=[0-9]{4}\.5>>[0-9],[0-9]01\.50 ", new["answer"])

@pytest.mark.parametrize("question, answer, why", [
    ("Tom has 5 pens and 3 cups.", "5+3=<<5+3=9>>9\n#### 9", "wrong arithmetic"),
    ("Tom has 5 pens and 3 cups.", "5+3=<<5+3=8>>8\n#### 9", "gold is not the last result"),
    ("Tom has 5 pens and 3 cups.", "5+3=<<5+3=8>>8\n#### 5", "gold is another number"),
    ("Tom has 5 pens and 3 cups.", "5+3=8\n#### 8", "no annotation"),
    ("Tom and 3 friends share 8 pens.", "8/4=<<8/4=2>>2\n#### 2", "4 comes from nowhere"),
    ("Tom has 8 pens and 2 cups.", "8*2=16, 8-2=<<8-2=6>>6\n#### 6", "16 comes from nowhere"),
    ("Tom and 3 friends share 8 pens.", "Each <<8/4=2>>2\n#### 2", "4, in the chain only"),
    ("150 pens in five boxes, and 30 more.", "150/5=<<150/5=30>>30\n150+30=<<150+30=180>>180"
     "\n#### 180", "which 30 is added"),
    ("She has 12 pens, uses 3 and buys 3 boxes of 4.", "12-3=<<12-3=9>>9\nAnd 12 new ones: "
     "3*4=<<3*4=12>>12\n12+9=<<12+9=21>>21\n#### 21", "12 is given and announced"),
    ("8 pens, 4 cups, 33 hats, 28 bags and 17 eggs.", "8+4=<<8+4=12>>12\n33-28=<<33-28=5>>5\n"
     "17-5=<<17-5=12>>12\n12+12=<<12+12=24>>24\n#### 24", "which 12 is which"),
    ("Ann has half of the 2 pens.", "2/2=<<2/2=1>>1\n#### 1", "2 may be the half"),
    ("Tom has 8 pens, 3 cups and 11 hats.", "8+3=11\n11-8=<<11-8=3>>3\n#### 3", "not annotated"),
    ("Tom has 5 pens, 3 cups and 16 hats.", "(5+3)*2=<<(5+3)*2=16>>16\n16-5=<<16-5=11>>11\n#### 11",
     "brackets"),
    ("Tom has 5 pens, 0 cups.", "5/0=<<5/0=5>>5\n#### 5", "a division by zero"),
    ("Tom has 5 pens.", "He has 15 pens, as 5*3=<<5*3=15>>15\n#### 15", "15 is announced"),
    ("Ann eats 3/4 of a pie.", "3/4=<<3/4=.75>>.75\n#### .75", "a fraction stays"),
    ("She reads 5 and 3, then 8 more.", "5+3=<<5+3=8>>8\n8+8=<<8+8=16>>16\n8+16=<<8+16=24>>24"
     "\n#### 24", "which 8 is which"),
])
def test_what_is_not_certain_is_refused(question, answer, why):
    assert not renumbered(problem(question, answer)), why

def test_meanings_times_and_percentages_stay():
    rows = renumbered(problem("From 9 am Ann works 4 hours a day, on May 5, for $8 a job in 1998.",
                              "4*8=<<4*8=32>>32\n#### 32"))
    assert rows
    for row in rows:
        assert row["question"].startswith("From 9 am Ann works 4 hours a day, on May 5, for $")
    for days in (5, 7):
        for row in renumbered(problem(f"Ann eats 9 plums on each of {days} days.",
                                      f"9*{days}=<<9*{days}={9 * days}>>.\n#### {9 * days}")):
            assert f"of {days} days" in row["question"]
    dozen = renumbered(problem("A dozen of 24 eggs broke.", "24-12=<<24-12=12>>12 left\n#### 12"))
    assert dozen and all("-12=<<" in row["answer"] and "-12=" in row["answer"][6:] for row in dozen)
    few = renumbered(problem("Tom has 5 pens and loses 3.", "5-3=<<5-3=2>>2\n#### 2"))
    assert len(few) > 40 and not any(row["answer"].endswith(" 1") for row in few)
    percent = renumbered(problem("Ann has 40 pens, 20% are red, and half of them are old.",
                                 "40*.2=<<40*.2=8>>8\n8/2=<<8/2=4>>4\n#### 4"))
    for row in percent:
        assert " 20% " in row["question"] and "/2=" in row["answer"] and "*.2=" in row["answer"]
    assert percent

def test_calculate_is_exact_and_the_chain_holds_nothing_else():
    for expression, value in (("1/3*3 - 2", -1), ("10-2*3+8/4", 6), ("8/4/2-1-1", -1),
                              ("1,000*2", 2000), (".5", 0.5), ("2*3*4/6-10+3", -3)):
        assert gsm8k.calculate(expression) == value
        assert gsm8k.ANNOTATION.fullmatch(f"<<{expression}=1>>")
    assert gsm8k.calculate("0.1+0.2") * 10 == 3
    for text in ("2**3", "7//2", "(1+2)", "1+", "-1", "a", "", "__import__('os')", "1,00"):
        assert not gsm8k.ANNOTATION.search(f"<<{text}=1>>")
    with pytest.raises(gsm8k.NOT_EXACT):
        gsm8k.calculate("1/0")

# ---- demonstrations ----

@pytest.mark.parametrize("rows, careless_share", [(HOME_MADE, 0.75), (SAMPLE * 20, 0.5)])
def test_sloppy_demonstrations_are_wrong_but_well_calculated(rows, careless_share):
    assert all(gsm8k.demonstration(row, random.Random(0)) == row["answer"] for row in rows)
    wrong = skipped = several = some = 0
    for seed, row in enumerate(rows):
        text = gsm8k.demonstration(row, random.Random(seed), sloppy=1.0)
        assert text == gsm8k.demonstration(row, random.Random(seed), sloppy=1.0)
        some += gsm8k.demonstration(row, random.Random(seed), sloppy=0.6) != row["answer"]
        if text != row["answer"]:
            wrong += 1
            several += row["answer"].count("<<") > 1
            skipped += text.count("<<") < row["answer"].count("<<")
            assert gsm8k.grade(text, row["answer"]) == 0
            if chain_is_exact(row["answer"]):
                assert chain_is_exact(text)
    assert wrong / len(rows) > careless_share and 0.8 * several < skipped < wrong
    assert abs(some / len(rows) - 0.6 * wrong / len(rows)) < 0.08

def test_an_addition_instead_of_a_subtraction_runs_through_the_chain():
    row = problem("", "Tom has 9-5=<<9-5=4>>4 pens.\nHe has 4+3=<<4+3=7>>7 pens.\n#### 7")
    texts = {gsm8k.demonstration(row, random.Random(seed), 1.0) for seed in range(20)}
    assert texts == {"Tom has 9-5=<<9-5=4>>4 pens.\n#### 4", "Tom has 9+5=<<9+5=14>>14 pens.\n"
                     "He has 14+3=<<14+3=17>>17 pens.\n#### 17"}

def test_a_careless_answer_that_is_right_by_chance_is_not_used():
    row = problem("", "He has 3*2=<<3*2=6>>6\n6*1=<<6*1=6>>6\n#### 6")
    assert all(gsm8k.demonstration(row, random.Random(i), 1.0) == row["answer"] for i in range(9))

# ---- tokenizer ----

def corpus():
    return [text for row in HOME_MADE for text in (gsm8k.prompt(row["question"]), row["answer"])]

def test_tokenizer_round_trip_digits_and_end_token():
    tokenizer = gsm8k.train_tokenizer(corpus(), 400)
    assert 300 < tokenizer.n_vocab <= 400
    assert tokenizer.encode_single_token(gsm8k.END) == tokenizer.n_vocab - 1
    for text in ("Zoë paid €5 😀\n\n\t ½", "٣ 五\u202f\x00\x1c", "x" * 999, gsm8k.END, corpus()[9]):
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == text and tokenizer.n_vocab - 1 not in ids
    assert [tokenizer.decode([i]) for i in tokenizer.encode_ordinary("1024")] == list("1024")
    assert len(tokenizer.encode_ordinary(corpus()[0])) < len(corpus()[0]) / 2
    assert "\ufffd" in tokenizer.decode([0xF0])             # half a character does not raise
    rest = gsm8k.train_tokenizer(["aab aab aab aac"], 5000)         # until no pair comes twice
    assert [rest.decode([i]) for i in range(256, rest.n_vocab - 1)] == ["aa", "aab", " aab"]
    assert gsm8k.train_tokenizer(corpus(), 257).n_vocab == 257      # bytes and END alone
    words = tokenizer.encode_ordinary("Answer:\n He starts with 3.")    # frequent words are whole
    assert [tokenizer.decode([i]) for i in words] == ["Answer", ":\n", " He", " starts", " with",
                                                      " ", "3", "."]
    copy = gsm8k.tokenizer_from_json(gsm8k.tokenizer_to_json(tokenizer))
    assert copy.n_vocab == tokenizer.n_vocab
    assert all(copy.encode_ordinary(t) == tokenizer.encode_ordinary(t) for t in corpus()[:50])

# ---- load ----

GOOD = json.dumps(SAMPLE[0])

@pytest.mark.parametrize("line, told", [
    ("{", "JSONDecodeError"), ("[1]", "TypeError"), ("", "JSONDecodeError"), ("\udcff", "Unicode"),
    ('{"question": "a"}', "'answer'"), ('{"answer": "#### 1"}', "'question'"),
    ('{"question": 3, "answer": "#### 1"}', "AttributeError"),
    ('{"question": "a", "answer": 3}', "no readable gold"),
    ('{"question": "a", "answer": "so it is #### many"}', "no readable gold"),
])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, told):
    text = f"{GOOD}\n{line}\n{GOOD}\n"
    (tmp_path / "train.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"train\.jsonl line 2 .*mend or remove it") as error:
        gsm8k.load("train", str(tmp_path))
    assert told in str(error.value)

def test_folders(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    for source, split in ((tmp_path / "absent", "test"), (tmp_path, "test"), (tmp_path, "train")):
        with pytest.raises(FileNotFoundError, match=r"\.jsonl does not exist or is empty.*--data"):
            gsm8k.load(split, source)
    (tmp_path / "test.jsonl").write_text(GOOD + "\n" + GOOD)
    assert gsm8k.load("test", str(tmp_path)) == [SAMPLE[0]] * 2

class Hub:
    def __init__(self, result):
        self.result = result

    def load_dataset(self, *names, split):
        if isinstance(self.result, Exception):
            raise self.result
        assert names == ("openai/gsm8k", "main") and split == "test"
        return self.result

def test_hugging_face(monkeypatch):
    for module in (Hub(OSError("offline\nfor good")), None):   # None: datasets is not installed
        monkeypatch.setitem(sys.modules, "datasets", module)
        with pytest.raises(ConnectionError) as error:
            gsm8k.load("train")
        message = str(error.value)
        assert "--data FOLDER" in message and "--data builtin" in message and "\n" not in message
    monkeypatch.setitem(sys.modules, "datasets", Hub(SAMPLE))
    assert gsm8k.load("test") == SAMPLE

# ---- all of GSM8K ----

@full_data
def test_every_gold_grades_its_own_answer():
    folder = os.environ["GSM8K_DIR"]
    rows = gsm8k.load("train", folder) + gsm8k.load("test", folder)
    assert len(rows) == 8792
    assert all(gsm8k.grade(row["answer"], row["answer"]) == 1 for row in rows)
    assert all(gsm8k.grade(row["answer"] + "1", row["answer"]) == 0 for row in rows)

@full_data
def test_most_rows_can_be_renumbered():
    rows, rng = gsm8k.load("train", os.environ["GSM8K_DIR"]), random.Random(0)
    news = [(row, new) for row in rows if (new := gsm8k.renumber(row, rng))]
    for row, new in news:
        check_renumbered(row, new)
    assert len(news) / len(rows) > 0.43                     # measured: 45.2%
