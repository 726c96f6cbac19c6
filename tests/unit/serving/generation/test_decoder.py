"""The text of answers as their tokens come."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from app.errors import EngineError
from app.serving.generation.decoder import AnswerText, StopTexts, token_texts
from app.serving.generation.tokenizer import GenerationTokenizer

ALPHABET = "abc <|>\n▁é这🤦\u200d♀️"


def sentence_pieces(*, strips: bool) -> Tokenizer:
    """Return a tokenizer as Llama 2's, with pieces of texts and a token for each byte."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "▁▁", "é", "这", ".", "<0x4>"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁the", "a", "▁▁", "é", "b▁"]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.fixture(params=["byte-level", "sentence pieces", "stripped sentence pieces", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, language_model: Path) -> Tokenizer:
    match request.param:
        case "byte-level":
            return Tokenizer.from_file(str(language_model / "tokenizer.json"))
        case "metaspace":
            return metaspace()
        case kind:
            return sentence_pieces(strips=kind.startswith("stripped"))


def streamed(tokenizer: GenerationTokenizer, tokens: Sequence[int], stop: Sequence[str], draw: random.Random) -> str:
    """Return the text of tokens that come in random groups."""
    answer, text, place, ids = tokenizer.answer(stop), "", 0, list[int]()
    while place < len(tokens):
        group = tokens[place : place + draw.randint(1, 4)]
        part = answer.add(tokenizer.written(group), ())
        text, place = text + part.text, place + len(group)
        ids += [token.id for token in part.tokens]
        if part.is_stopped:
            assert ids == list(tokens[: len(ids)])
            return text
    rest = answer.end()
    ids += [token.id for token in rest.tokens]
    assert ids == list(tokens[: len(ids)])
    assert rest.is_stopped or len(ids) == len(tokens)
    return text + rest.text


def test_a_token_has_the_offset_of_its_text(tokenizer: Tokenizer) -> None:
    """Stripped spaces and bytes that are not UTF-8 shift it (as in vllm-project/vllm#47815, for echoed prompts)."""
    generation = GenerationTokenizer(tokenizer)
    for seed in range(50):
        draw = random.Random(seed)
        answer = generation.answer(())
        parts = [answer.add(generation.written([draw.randrange(tokenizer.get_vocab_size())]), ()) for _ in range(40)]
        parts.append(answer.end())
        text = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.tokens]
        offsets = [token.offset for token in tokens]
        assert offsets == sorted(offsets)
        for token, (_, written, is_special) in zip(
            tokens, generation.written([token.id for token in tokens]), strict=True
        ):
            own = "" if is_special or written.startswith("<0x") else token.text.decode(errors="ignore")
            expected = own.strip() if token is tokens[0] else own
            assert text.startswith(expected, token.offset), (text, token)


def cut(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the stop text that is complete first, the longest of several, by trying each place."""
    for end in range(1, len(text) + 1):
        if found := max((len(one) for one in stop if text[:end].endswith(one)), default=0):
            return text[: end - found]
    return text


def test_a_streamed_text_is_that_of_all_tokens_at_once(tokenizer: Tokenizer) -> None:
    draw, served = random.Random(1), GenerationTokenizer(tokenizer)
    ids = sorted(tokenizer.get_vocab().values())
    for _ in range(300):
        answer = draw.choices(ids, k=draw.randint(0, 40))
        assert streamed(served, answer, (), draw) == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_text_ends_before_the_first_of_many_stop_texts(tokenizer: Tokenizer) -> None:
    draw, served = random.Random(2), GenerationTokenizer(tokenizer)
    ids, num_cut = sorted(tokenizer.get_vocab().values()), 0
    for _ in range(1000):
        answer = draw.choices(ids, k=draw.randint(1, 30))
        text = tokenizer.decode(answer, skip_special_tokens=True)
        starts = [draw.randrange(len(text) + 1) for _ in range(draw.randint(0, 4))]
        stop = [*filter(None, (text[start : start + draw.randint(1, 6)] for start in starts)), "never said"]
        assert streamed(served, answer, stop, draw) == cut(text, stop)
        num_cut += cut(text, stop) != text
    assert num_cut > 300


@pytest.mark.parametrize(
    ("stop", "parts", "expected"),
    [
        (["aab"], ["aa", "aab"], "aa"),
        (["abab", "b"], ["a", "b"], "a"),
        (["\n\n", "\n"], ["x\n", "\n"], "x"),
        (["abcd", "bc"], ["a", "b", "c", "d"], "a"),
        (["ab", "b"], ["xab"], "x"),
        (["abc"], ["ab", "ab", "x"], "ababx"),
    ],
)
def test_stop_texts_cross_parts_and_overlap(stop: list[str], parts: list[str], expected: str) -> None:
    stops, sent = StopTexts(stop), ""
    for part in parts:
        text, is_stopped = stops.add(part)
        sent += text
        if is_stopped:
            break
    else:
        sent += stops.end()
    assert sent == expected


def test_a_beginning_of_a_stop_text_is_held_back_until_it_is_none() -> None:
    stops = StopTexts(["END."])
    assert [stops.add(part)[0] for part in ("xE", "ND", "!", "E")] == ["x", "", "END!", ""]
    assert stops.end() == "E"


def test_characters_are_complete_and_tokens_have_their_bytes(language_model: Path) -> None:
    tokenizer = GenerationTokenizer.load(language_model)
    text = "🤦‍♀️é"
    answer: AnswerText = tokenizer.answer(())
    parts = [answer.add(tokenizer.written([token]), [-0.5]) for token in tokenizer.encode(text)]
    assert len(parts) > len(text)
    assert "�" not in "".join(part.text for part in parts)
    assert "".join(part.text for part in parts) == text
    tokens = [token for part in parts for token in part.tokens]
    assert b"".join(token.text for token in tokens) == text.encode()
    assert {token.logprob for token in tokens} == {-0.5}
    # Each part has the tokens of its characters, not a part of one.
    assert all(b"".join(token.text for token in part.tokens) == part.text.encode() for part in parts)


def test_tokens_of_a_stop_text_are_not_sent(language_model: Path) -> None:
    tokenizer = GenerationTokenizer.load(language_model)
    answer = tokenizer.answer(["XYZ"])
    part = answer.add(tokenizer.written(tokenizer.encode("aXYbXYZc")), ())
    assert part.is_stopped
    assert b"".join(token.text for token in part.tokens) == part.text.encode() == b"aXYb"


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    tokenizer = metaspace()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(EngineError, match=r"WordPiece.*cannot be streamed"):
        token_texts(tokenizer)
