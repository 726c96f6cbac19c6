"""Odd files give the same values whole, in tiny units and as messages, or one sentence that says what to do."""

import base64
import bz2
import datetime as dt
import gzip
import json
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from app.config import CleanConfig, ColumnsConfig, DataConfig
from app.config.stream import StreamConfig
from app.data.preparation.encoding import Encoding
from app.data.preparation.samples import Documents, Labelled, TaggedTexts
from app.data.sources import units
from app.data.sources.formats import FORMATS
from app.data.sources.labelled import INPUT, LABEL, labelled_columns
from app.data.sources.lines import parse_json
from app.data.sources.source import Source
from app.data.sources.units import list_files, read_source
from app.data.streaming.messages import Message
from app.data.streaming.rows import StreamRows
from app.data.targets import Classes
from app.data.written import name_of
from app.errors import DataError
from tests.examples import read_examples
from tests.helpers import ROOT
from tests.odd import LEFT_OUT, Odd, arrow, lines, parquet, picture, tar, zipped

TINY = 16
"""Bytes of a unit: about a row."""
HEAD, ROW = "text,label\n", {"text": "a", "label": "b"}
ONE, BOTH, XY = [("a", "b")], [("a", "b"), ("c", "d")], pa.array(["x", "y"])
TEXTS = pa.array(["one", "two"])
READ = [("one", "x"), ("two", "y")]
PNG = picture()


def csv(name: str, content: bytes | str, read: Any = (), refused: str = "", **more: Any) -> Odd:
    return Odd(f"csv: {name}", {more.pop("file", "rows.csv"): content}, read, refused, **more)


def jsonl(name: str, content: bytes | str, read: Any = (), refused: str = "", **more: Any) -> Odd:
    return Odd(f"jsonl: {name}", {"rows.jsonl": content}, read, refused, **more)


def table(name: str, read: Any = (), refused: str = "", **more: Any) -> list[Odd]:
    """Return a table as a parquet and as an Arrow file, unless one of them has no such type."""
    columns, kinds = more.pop("of"), more.pop("kinds", ("parquet", "arrow"))
    given = columns if isinstance(columns, pa.Table) else pa.table({"text": TEXTS, "label": XY} | columns)
    write = {"parquet": parquet, "arrow": arrow, "stream": lambda table: arrow(table, stream=True)}
    return [
        Odd(
            f"{kind}: {name}",
            {f"rows.{'parquet' if kind == 'parquet' else 'arrow'}": write[kind](given)},
            read,
            refused,
            **more,
        )
        for kind in kinds
    ]


def pictures(name: str, files: dict[str, Any], read: Any = (), refused: str = "", **more: Any) -> Odd:
    files = {f"pictures/{path}": content for path, content in files.items()}
    return Odd(f"pictures: {name}", files, read, refused, "image", source="pictures", **more)


def tars(name: str, content: bytes, read: Any = (), refused: str = "", **more: Any) -> Odd:
    return Odd(f"tar: {name}", {more.pop("file", "some.tar"): content}, read, refused, more.pop("contents", "image"))


def tagged(name: str, row: dict[str, Any] | bytes | str, read: Any = (), refused: str = "", **columns: Any) -> Odd:
    content = lines(row) if isinstance(row, dict) else row
    return Odd(f"tags: {name}", {"rows.jsonl": content}, read, refused, "tagged", columns)


def record(name: str, cells: str | bytes, read: Any = (), refused: str = "") -> Odd:
    content = b"image,text,label\n" + (cells.encode() if isinstance(cells, str) else cells)
    return Odd(
        f"record: {name}", {"rows.csv": content, "one.png": PNG}, read, refused, "record", FIELDS, source="rows.csv"
    )


FIELDS = {"fields": {"image": {"kind": "image"}, "text": {"kind": "text"}}}
NOT_UTF_8 = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff"))
LONG = pa.table({"text": [f"some longer text {number}" for number in range(50)], "label": ["x"] * 50})
DAY = dt.date(2020, 1, 2)
PAIR = tar(("0.png", PNG), ("0.cls", b"a"), ("1.png", PNG), ("1.cls", b"b"))


def link(target: str) -> Any:
    return lambda path: path.symlink_to(path.parent / target)


def frame(index: Any, **columns: Any) -> Any:
    return lambda path: pd.DataFrame(columns, index=index).to_parquet(path)


CSV = [
    csv("more cells", HEAD + "fine,a\n8,63,light\n", refused="rows.csv', row 2…3 cells…2 columns…8,63,light…quotes"),
    csv("fewer cells", HEAD + "fine,a\nonly\n", refused="rows.csv', row 2…1 cells…2 columns"),
    csv("a separator at the end of rows", HEAD + "a,b,\n", refused="rows.csv', row 1…3 cells…2 columns"),
    csv("a separator at the end of all lines", "text,label,\na,b,\nc,d,\n", BOTH),
    csv("one name twice", "text,text,label\na,b,c\n", refused="data.columns.input…'text'…2 columns…rename"),
    csv("one name twice, not read", "x,x,text,label\n1,2,a,b\n", ONE),
    csv("one name twice in features", "x,x,label\n1,2,b\n", refused="'x'…2 columns…rename", contents="row"),
    csv("empty names", "n,label,,\n1,b,c,d\n", [({"n": "1"}, "b")], contents="row", told="pandas calls the index"),
    csv("an index", "Unnamed: 0.1,Unnamed: 0,n,label\n7,0,1,b\n",
        [({"n": "1"}, "b")], contents="row", told="0.1', 'Un"),
    csv("an index that is named", ",n,label\n7,1,b\n", [({"": "7"}, "b")], contents="row", columns={"features": [""]}),
    csv("BOM", b"\xef\xbb\xbf" + b'"text","label"\na,b\n', ONE),
    csv("UTF-16", (HEAD + "a,b\n").encode("utf-16"), refused="rows.csv…UTF-16…write it in UTF-8"),
    csv("UTF-16 without BOM", (HEAD + "a,b\n").encode("utf-16-le"), refused="rows.csv…UTF-16…UTF-8"),
    csv("UTF-32", (HEAD + "a,b\n").encode("utf-32"), refused="rows.csv…UTF-32…UTF-8"),
    csv("cp1252 in the header", "té,label\na,b\n".encode("cp1252"), refused="rows.csv…names of the columns…UTF-8"),
    csv("cp1252 in a text", HEAD.encode() + b"\xe9,b\nx,c\n", [LEFT_OUT, ("x", "c")]),
    csv("cp1252 in a label", HEAD.encode() + b"x,\xe9\n", refused="rows.csv', row 1…'label'…UTF-8: correct"),
    csv("cp1252 in a feature", b"n,label\n\xe9,a\n", refused="rows.csv', row 1…'n'…UTF-8", contents="row"),
    csv("gzip", gzip.compress((HEAD + "a,b\n").encode()), refused="rows.csv…gzip: unpack"),
    csv("zip", zipped("rows.csv", HEAD), refused="rows.csv…zip…unpack"),
    csv("xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100), refused="rows.csv…Excel: save it as csv"),
    csv("parquet", parquet(text=TEXTS), refused="rows.csv…parquet table…ending"),
    csv("names that begin as other formats do", "PAR1,text,label\nx,a,b\n", ONE),
    csv("a name that begins as bzip2 does", "BZhang,text,label\nx,a,b\n", ONE),
    csv("bzip2", bz2.compress(HEAD.encode()), refused="rows.csv…bzip2: unpack"),
    csv("in capitals", HEAD + "a,b\n", ONE, file="ROWS.CSV"),
    csv("CRLF", "text,label\r\na,b\r\nc,d\r\n", BOTH),
    csv("CR", "text,label\ra,b\rc,d\r", BOTH),
    csv("CR and quotes", 'text,label\ra,"b"\rc,"d"\r', BOTH),
    csv("all line ends", 'text,label\na,b\r\nc,d\r"e",f\n', [*BOTH, ("e", "f")]),
    csv("line ends in cells", 'text,label\r\n"a\r\nb\rc\nd",x\r\nc,d\r\n', [("a\r\nb\rc\nd", "x"), ("c", "d")]),
    csv("quotes", HEAD + '"say ""hi"", you",a\n"","x"\n', [('say "hi", you', "a"), ("", "x")]),
    csv("bare quotes", HEAD + 'a "b" c,d\n5" pipe,e\n', [('a "b" c', "d"), ('5" pipe', "e")]),
    csv("a quote left open", HEAD + 'fine,a\n"open,a\nfine,b\n', refused="rows.csv', row 2…quote is left open"),
    csv("the last cell left open", HEAD + 'fine,a\nx,"open\nfine,b\n', refused="rows.csv', row 2…quote is left open"),
    csv("two quotes left open", HEAD + 'fine,a\nx,"y\nfine,b\nz,"w\nu,v\n', refused="rows.csv', row 2…left open"),
    csv("a quote left open in the header", '"text,label\nfine,a\n', refused="rows.csv…names…quote left open"),
    csv("escaped by a backslash", HEAD + 'x,y\n"a \\" b",c\n', refused="rows.csv', row 2…quote…within a cell twice"),
    csv("text after a quoted cell", HEAD + '"a"b,c\n', refused="rows.csv', row 1…quote…within a cell twice"),
    csv("white space around cells", HEAD + " a , b \n", [(" a ", "b")]),
    csv("white space in the header", "text, label\na,b\n", refused="data.columns.label…rows.csv…text,  label…name"),
    csv("zero byte in a cell", HEAD + "a\0b,c\nx,d\n", [("a\0b", "c"), ("x", "d")]),
    csv("zero bytes after the rows", HEAD + "a,c\n" + "\0" * 20, refused="rows.csv', row 2…1 cells"),
    csv("zero bytes alone", "\0" * 40, refused="rows.csv…zero bytes…torn"),
    csv("only a header", HEAD, []),
    csv("only a header without end", "text,label", []),
    csv("empty", "", []),
    csv("empty table", "", [], contents="row"),
    csv("blank lines", "\n  \n" + HEAD + "\na,b\n\n\nc,d\n\n", BOTH),
    csv("joined files", (HEAD + "a,b\n") * 2, refused="rows.csv', row 2…repeats the names…remove"),
    csv("a comment before the header", "# x\n" + HEAD + "a,b\n", refused="data.columns.input…rows.csv…# x…correct"),
    csv("semicolons", "text;label\na;b\n", refused="data.columns.input…rows.csv…text;label…write it with commas"),
    csv("tabs", "text\tlabel\na\tb\n", refused="data.columns.input…rows.csv…text\tlabel…write it with commas"),
    csv("commas and quotes in tsv", 'text\tlabel\na,"b\tc\nd, e\tf\n', [('a,"b', "c"), ("d, e", "f")], file="rows.tsv"),
    csv("a very long row", HEAD + "x" * 3_000_000 + ",b\nc,d\n", [("x" * 3_000_000, "b"), ("c", "d")]),
    csv("too long a row", HEAD + "x" * 17_000_000 + ",b\n", refused="rows.csv', row 1…16,777,216 bytes: break"),
    csv("a name that is HTML", "<html></html>\n", refused="rows.csv…<html></html>…correct"),
    csv("labels", HEAD + "a, pos\nb,pos\nc,1\nd,1.0\ne,007\nf,1.10\n", [
        ("a", "pos"), ("b", "pos"), ("c", "1"), ("d", "1"), ("e", "007"), ("f", "1.10"),
    ]),
    csv("words of missing values as labels", HEAD + "NA,NA\nnull,None\n,\n",
        [("NA", "NA"), ("null", "None"), ("", "")]),
    Odd("csv: files with the columns in another order", {"a.csv": HEAD + "a,b\n", "b.csv": "label,text\nd,c\n"}, BOTH),
    Odd("csv: a file without a column", {"a.csv": HEAD + "a,b\n", "b.csv": "text,klass\nc,d\n"}, refused="b.csv…klass"),
    Odd("csv: an empty file beside", {"a.csv": HEAD + "a,b\n", "b.csv": "", "c.md": ""}, ONE, told="1 files…1 .md"),
    Odd("csv: in a folder with its name", {"rows.csv/part.csv": HEAD + "a,b\n"}, ONE, source="rows.csv"),
    Odd("csv: packed beside", {"a.csv": HEAD + "a,b\n", "b.csv.gz": b"x"}, ONE, told="1 files are not read (1 .gz)"),
]  # fmt: skip
JSONL = [
    jsonl("BOM", b"\xef\xbb\xbf" + lines(ROW, ROW).encode(), ONE * 2),
    jsonl("BOM on a blank line", "\ufeff\n" + lines(ROW), ONE),
    jsonl("BOM between rows", lines(ROW) + "\ufeff" + lines(ROW), ONE * 2),
    jsonl("ends of lines in texts", lines({"text": "a\u2028b\u0085c\u2029", "label": "x\u2028"}), [
        ("a\u2028b\u0085c\u2029", "x")
    ]),
    jsonl("a vertical tab and a zero byte", '{"text": "a\\u000bb\\u0000c", "label": "b"}\n', [("a\vb\0c", "b")]),
    jsonl("a vertical tab as it is", '{"text": "a\vb", "label": "b"}\n',
        refused="rows.jsonl', line 1…control character"),
    jsonl("NaN", '{"text": "a", "label": NaN}\n{"text": NaN, "label": "x"}\n', [("a", ""), ("", "x")]),
    jsonl("half of a pair", '{"text": "a\\ud83d", "label": "x"}\n{"text": "\\ud83d\\ude00", "label": "y"}\n', [
        LEFT_OUT, ("😀", "y"),
    ]),
    jsonl("half of a pair in a label", '{"text": "a", "label": "\\ud83d"}\n', refused="line 1…'label'…UTF-8"),
    jsonl("large numbers", '{"text": "a", "label": 123456789012345678901}\n{"text": "b", "label": 9007199254740993}', [
        ("a", "123456789012345678901"), ("b", "9007199254740993"),
    ]),
    jsonl("large numbers in features", '{"n": 12345678901234567890123, "label": 1}\n', [
        ({"n": 12345678901234567890123.0}, "1"),
    ], contents="row"),
    jsonl("a key twice", '{"text": "a", "text": "b", "label": "x"}\n', refused="line 1…'text' twice…rename"),
    jsonl("a key twice within", '{"text": "a", "label": "x", "more": [{"y": 1, "y": 2}]}\n',
        refused="line 1…'y' twice"),
    jsonl("colons in texts", lines({"text": 'a "b": c', "label": "x", "more": {"text": 1}}), [('a "b": c', "x")]),
    jsonl("a key missing", lines(ROW, {"text": "c"}), refused="data.columns.label…rows.jsonl', line…text…null"),
    jsonl("a feature missing", lines({"a": 1, "b": 2, "label": "x"}, {"b": 1, "label": "y"}), [
        ({"a": 1, "b": 2}, "x"), ({"a": None, "b": 1}, "y"),
    ], contents="row"),
    jsonl("null", lines({"text": None, "label": "x"}, {"text": "a", "label": None}), [("", "x"), ("a", "")]),
    jsonl("an object as text", lines({"text": {"a": 1}, "label": "x"}), refused="line 1…'text'…an object…data.columns"),
    jsonl("a list as text", lines({"text": ["a"], "label": "x"}), refused="line 1…'text'…a list…data.columns.input"),
    jsonl("a list as label", lines({"text": "a", "label": ["x"]}), refused="line 1…'label'…a list…data.columns.label"),
    jsonl("a list as feature", lines({"n": [1], "label": "x"}), refused="line 1…'n'…a list…features", contents="row"),
    jsonl("nested deeply", '{"text": "a", "label": "b", "x": ' + "[" * 500 + "]" * 500 + "}\n", ONE),
    jsonl("nested too deeply", '{"text": "a", "x": ' + "[" * 99_000 + "]" * 99_000 + "}\n", refused="line 1…flat"),
    jsonl("an array", json.dumps([ROW, ROW]), refused="line 1…a list…object on each line"),
    jsonl("in several lines", json.dumps(ROW, indent=1), refused="line 1…not JSON…object on each line"),
    jsonl("a trailing comma", '{"text": "a", "label": "b",}\n', refused="line 1…not JSON"),
    jsonl("commas between rows", '{"text": "a", "label": "b"},\n' * 2, refused="line 1…not JSON…Extra data"),
    jsonl("single quotes", "{'text': 'a', 'label': 'b'}\n", refused="line 1…not JSON"),
    jsonl("a number", "1\n", refused="line 1…a number…an object"),
    jsonl("CRLF and blank lines", lines(ROW).replace("\n", "\r\n") + "\r\n  \n" + lines(ROW), ONE * 2),
    jsonl("CR", lines(ROW, ROW).replace("\n", "\r"), refused="line 1…not JSON"),
    jsonl("no last line end", lines(ROW, ROW).rstrip("\n"), ONE * 2),
    jsonl("torn", lines(ROW, ROW)[:-8], refused="rows.jsonl', line…not JSON"),
    jsonl("gzip", gzip.compress(lines(ROW).encode()), refused="rows.jsonl…gzip: unpack"),
    jsonl("UTF-16", lines(ROW).encode("utf-16"), refused="rows.jsonl…UTF-16…UTF-8"),
    jsonl("cp1252", b'{"text": "\xe9", "label": "b"}\n', refused="line 1…UTF-8"),
    jsonl("empty", "", []),
    jsonl("zero bytes", lines(ROW) + "\0\0\0", refused="rows.jsonl', line…not JSON"),
    jsonl("types", lines(*({"text": cell, "label": cell} for cell in (1, 1.0, "1.0", True, -0.0, 0.1, " 2.50 "))), [
        ("1", "1"), ("1", "1"), ("1.0", "1"), ("True", "True"), ("0", "0"), ("0.1", "0.1"), (" 2.50 ", "2.50"),
    ]),
    jsonl("features of several types", lines(*({"n": cell, "label": "x"} for cell in (1, "a", 2.0, True, None))), [
        ({"n": cell}, "x") for cell in ("1", "a", "2", "True", None)
    ], contents="row"),
    Odd("jsonl: in capitals", {"ROWS.NDJSON": lines(ROW)}, ONE),
    Odd("json: another ending", {"rows.json": lines(ROW)}, refused="rows.json' has none of the files…expected .csv"),
]  # fmt: skip
TABLES = [
    *table("dictionaries", READ, of={"text": TEXTS.dictionary_encode(), "label": XY.dictionary_encode()}),
    *table("views", READ, of={"text": TEXTS.cast(pa.string_view()), "label": XY.cast(pa.string_view())}),
    *table(
        "dictionaries of views, as polars writes Enum",
        READ,
        of={"label": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.uint32()), XY.cast(pa.string_view()))},
        kinds=("arrow", "stream"),
    ),
    *table("large types", READ, of={"text": TEXTS.cast(pa.large_string()), "label": XY.cast(pa.large_binary())}),
    *table("bytes", [LEFT_OUT, ("b", "y")], of={"text": pa.array([b"\xff", b"b"]), "label": XY.cast(pa.binary())}),
    *table("bytes as a label", refused="row…'label'…UTF-8", of={"label": pa.array([b"\xff", b"b"])}),
    *table("a text that is no UTF-8", [("a", "x"), LEFT_OUT], of={"text": NOT_UTF_8}),
    *table("a label that is no UTF-8", refused="row…'label'…UTF-8", of={"label": NOT_UTF_8}),
    *table("decimals", [("one", "1"), ("two", "1.1")], of={"label": pa.array([Decimal("1.00"), Decimal("1.10")])}),
    *table("decimals with too many digits for a float", contents="row", columns={
        "features": ["n"], "categories": ["n"]}, read=[({"n": "9007199254740993"}, "x"), ({"n": "0.1"}, "y")], of={
        "n": pa.array([Decimal(2**53 + 1), Decimal("0.10")], pa.decimal128(38, 2))}),
    *table("nanoseconds of a moment", [("one", "1970-01-01 00:00:00.000001"), ("two", "")], of={
        "label": pa.array([1000, None], pa.timestamp("ns"))}),
    *table("parts of a microsecond", refused="row 1…'label'…timestamp[ns]…texts", of={
        "label": pa.array([1, None], pa.timestamp("ns"))}),
    *table("a length of time in two units", [("one", "0:00:01"), ("two", "")], kinds=["arrow"], of={
        "label": pa.array([10**9, None], pa.duration("ns"))}),
    *table("dates", [("one", "2020-01-02"), ("two", "")], of={"label": pa.array([DAY, None])}),
    *table("a day as a feature", [({"n": "2020-01-02"}, "x"), ({"n": None}, "y")], contents="row", columns={
        "features": ["n"]}, of={"n": pa.array([DAY, None])}),
    *table("a time with a zone", [("one", "2020-01-02 03:04:05+00:00"), ("two", "")], of={
        "label": pa.array([dt.datetime(2020, 1, 2, 3, 4, 5), None], pa.timestamp("us", "UTC"))}),
    *table("a zone that is not known", refused="row 1…'label'…Mars/Phobos…texts", kinds=["arrow"], of={
        "label": pa.array([1, 2], pa.timestamp("us", "Mars/Phobos"))}),
    *table("a time after the year 9999", refused="row 1…'label'…timestamp[s]…texts", kinds=["arrow"], of={
        "label": pa.array([2**62, 2], pa.timestamp("s"))}),
    *table("nanoseconds of a day",
        refused="row 1…'label'…time64[ns]…texts", of={"label": pa.array([1, 2], pa.time64("ns"))}),
    *table("float32", [("one", "0.1"), ("two", "1")], of={"label": pa.array([0.1, 1.0], pa.float32())}),
    *table("whole and missing numbers", [("1", "2"), ("", "")], of={
        "text": pa.array([1.0, None]), "label": pa.array([2.0, float("nan")])}),
    *table("NaN in features", [({"n": 1.5}, "x"), ({"n": None}, "y")], contents="row", columns={"features": ["n"]}, of={
        "n": pa.array([1.5, float("nan")], pa.float32())}),
    *table("bool", [("True", "True"), ("", "")], of={"text": pa.array([True, None]), "label": pa.array([True, None])}),
    *table("unsigned", [("one", str(2**64 - 1)), ("two", "1")], of={"label": pa.array([2**64 - 1, 1], pa.uint64())}),
    *table("type null", [("", ""), ("", "")], of={"text": pa.nulls(2), "label": pa.nulls(2)}),
    *table("a list as text", refused="row…'text'…a list…data.columns.input", of={"text": pa.array([["a"], ["b"]])}),
    *table("an object as text", refused="row…'text'…an object", of={"text": pa.array([{"a": 1}, {"a": 2}])}),
    *table("a list as label", refused="row…'label'…a list…data.columns.label", of={"label": pa.array([["a"], ["b"]])}),
    *table("uuid", [("one", "00" * 4 + "-0000" * 3 + "-" + "00" * 6), ("two", "f" * 8 + "-ffff" * 3 + "-" + "f" * 12)],
           of={"label": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16), b"\xff" * 16], pa.binary(16)))}),
    *table("bool8", [("one", "False"), ("two", "True")], kinds=["arrow"], of={
        "label": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1], pa.int8()))}),
    *table("one name twice", refused="data.columns.input…'text'…2 columns…rename", of=pa.Table.from_arrays(
        [TEXTS, TEXTS, XY], ["text", "text", "label"])),
    *table("one name twice, not read", READ,
        of=pa.Table.from_arrays([TEXTS, TEXTS, TEXTS, XY], ["n", "n", "text", "label"])),
    *table("no rows", [], of=LONG.slice(0, 0)),
    *table("no columns", refused="data.columns.input…no columns", of=pa.table({})),
    *table("a dot in a name", READ, of={"a.b": XY}, columns={"label": "a.b"}),
    *table("a stream", READ, of={}, kinds=["stream"]),
    Odd("stream: torn", {"rows.arrow": arrow(LONG, stream=True)[:-8]}, refused="rows.arrow…torn…end-of-stream"),
    Odd("arrow: torn", {"rows.arrow": arrow(LONG)[:3000]}, refused="rows.arrow…cannot be read"),
    Odd("arrow: a hole", {"rows.arrow": arrow(LONG)[:1000] + bytes(1000) + arrow(LONG)[2000:]},
        refused="rows.arrow…cannot"),
    Odd("arrow: empty", {"rows.arrow": ""}, refused="rows.arrow…cannot be read"),
    Odd("arrow: csv", {"rows.arrow": HEAD + "a,b\n"}, refused="rows.arrow…cannot be read"),
    Odd("arrow: parquet", {"rows.arrow": parquet(LONG)}, refused="rows.arrow…parquet table"),
    Odd("parquet: torn", {"rows.parquet": parquet(LONG)[:300]}, refused="rows.parquet…cannot be read"),
    Odd("parquet: a hole", {"rows.parquet": parquet(LONG)[:300] + bytes(300) + parquet(LONG)[600:]},
        refused="rows.parq…cannot"),
    Odd("parquet: empty", {"rows.parquet": ""}, refused="rows.parquet…cannot be read"),
    Odd("parquet: an index as label", {
        "rows.parquet": frame(pd.Index(["x", "y"], name="label"), text=["one", "two"])}, READ),
    Odd("parquet: an index", {"rows.parquet": frame([5, 7], n=[1.5, 2], label=["x", "y"])}, [
        ({"n": 1.5}, "x"), ({"n": 2}, "y")], contents="row", told="'__index_level_0__'…left out"),
    Odd("parquet: an index of two levels", {"rows.parquet": frame(
        pd.MultiIndex.from_tuples([(1, 2), (3, 5)]), n=[1.5, 2], label=["x", "y"])}, [
        ({"n": 1.5}, "x"), ({"n": 2}, "y")], contents="row", told="'__index_level_1__'…left out"),
    Odd("parquet: one label in three types", {
        "a.parquet": parquet(text=["a"], label=[1]), "b.parquet": parquet(text=["b"], label=[1.0]),
        "c.parquet": parquet(text=["c"], label=["1"]), "d.csv": HEAD + "d,1.0\n"},
        [("a", "1"), ("b", "1"), ("c", "1"), ("d", "1")]),
    Odd("parquet: parts of Hive", {"year=2020/a.parquet": parquet(text=["a"], label=["b"]), "_SUCCESS": ""}, ONE,
        told="_SUCCESS"),
]  # fmt: skip
NUMBERS = [
    csv("words of missing values", "n,label\nNA,a\n?,b\nNULL,a\nnan,b\n ,a\n1.5,b\n", [
        ({"n": cell}, label) for cell, label in zip([None] * 5 + [1.5], "ababab", strict=True)
    ], contents="row"),
    csv("words that are no numbers", 'n,label\n1,a\n"1,234",b\n1_000,a\ninf,b\n1e999,a\n', [
        ({"n": cell}, label) for cell, label in zip(["1", "1,234", "1_000", "inf", "1e999"], "ababa", strict=True)
    ], contents="row"),
]  # fmt: skip
FILES = [
    pictures("all formats", {
        "a/1.png": PNG, "a/2.JPG": picture(kind="JPEG"), "b/1.jfif": picture(kind="JPEG"),
        "b/2.webp": picture(kind="WEBP"), "b/3.BMP": picture(kind="BMP"),
    }, [(PNG, "a"), (picture(kind="JPEG"), "a"),
        (picture(kind="JPEG"), "b"), (picture(kind="WEBP"), "b"), (picture(kind="BMP"), "b")]),
    pictures("a class without a readable file", {"a/1.png": PNG, "b/1.avif": b"x"}, refused="'b'…'1.avif'…convert"),
    pictures("some not readable", {"a/1.png": PNG, "a/2.heic": b"x", "b/1.png": PNG}, [(PNG, "a"), (PNG, "b")],
             told="1 files are not read (1 .heic)"),
    pictures("a file beside the classes", {"a/1.png": PNG, "2.png": PNG}, refused="2.png…CLASS/FILE…move it"),
    pictures("a class in a folder", {"train/a/1.png": PNG, "a/1.png": PNG}, refused="train/a/1.png…CLASS/FILE"),
    pictures("hidden files", {"a/1.png": PNG, "a/._1.png": b"x", ".trash/1.png": b"x", "b/1.png": PNG, "b/.x": b"x"},
             [(PNG, "a"), (PNG, "b")]),
    Odd("pictures: a dotted parent", {".data/p/a/1.png": PNG, ".data/p/b/1.png": PNG}, [(PNG, "a"), (PNG, "b")],
        contents="image", source=".data/p"),
    pictures("truncated", {"a/1.png": PNG, "a/2.png": PNG[:40], "a/3.png": b"", "b/1.png": PNG},
             [(PNG, "a"), LEFT_OUT, LEFT_OUT, (PNG, "b")]),
    pictures("another format than the ending", {"a/1.jpg": PNG}, [(PNG, "a")]),
    pictures("a class that is no UTF-8", {os.fsdecode(b"caf\xe9/1.png"): PNG, "b/1.png": PNG},
        refused="1.png…the folder is not text in UTF-8…rename"),
    pictures("odd names", {" a /1 2#?%20.png": PNG, "ü/1.png": PNG}, [(PNG, "a"), (PNG, "ü")]),
    pictures("a link to a file", {"a/1.png": PNG, "b/1.png": link("../a/1.png")}, [(PNG, "a"), (PNG, "b")]),
    pictures("a link to a folder", {"../else/1.png": PNG, "a/1.png": PNG, "b": link("../else")},
        [(PNG, "a"), (PNG, "b")]),
    pictures("a link to nothing", {"a/1.png": PNG, "a/2.png": link("none")}, refused="2.png…link to…does not exist"),
    pictures("a link to its folder", {"a/1.png": PNG, "a/b": link("..")}, refused="a/b…link to…lies in: remove"),
    tars("in capitals", tar(("0.PNG", PNG), ("0.CLS", b"a\n")), [(PNG, "a")], file="SOME.TAR"),
    tars("torn", PAIR[:1600], refused="some.tar…cannot be read as tar"),
    tars("torn between members", PAIR[:2048], refused="some.tar…torn…2,048"),
    tars("two joined", PAIR + PAIR, refused="some.tar…more after its end-of-archive…apart"),
    tars("gzip", gzip.compress(PAIR), refused="some.tar…gzip: unpack"),
    tars("empty", b"", refused="some.tar…cannot be read"),
    tars("no members", tar(), []),
    tars("another extension", tar(("0.img", PNG), ("0.cls", b"a")),
        refused="sample 0…picture…it has .img, .cls…expected"),
    tars("no label", tar(("0.png", PNG)), refused="sample 0…label…it has .png…expected .cls"),
    tars("json", tar(("0.png", PNG), ("0.json", b'\xef\xbb\xbf{"label": 3.0, "x": NaN}')), [(PNG, "3")]),
    tars("json with a key twice", tar(("0.png", PNG), ("0.json", b'{"label": 1, "label": 2}')),
        refused="0.json…'label' twice"),
    tars("json that is a list", tar(("0.png", PNG), ("0.json", b"[1]")), refused="sample 0.json…a list…object"),
    tars("BOM", tar(("0.txt", b"\xef\xbb\xbfhi"), ("0.cls", b"\xef\xbb\xbf3")), [("hi", "3")], contents="text"),
    tars("a label that is no UTF-8", tar(("0.png", PNG), ("0.cls", b"\xe9")), refused="sample 0…'label'…UTF-8"),
    tars("two pictures", tar(("0.png", PNG), ("0.jpg", PNG), ("0.cls", b"a")), refused="sample 0…2 members…keep one"),
    tars("a member twice", tar(("0.png", PNG), ("0.png", PNG), ("0.cls", b"a")), refused="sample 0…two members .png"),
    tars("a name that is no UTF-8", tar(("caf\udce9.png", PNG[:9]), ("caf\udce9.txt", b"a")), [LEFT_OUT]),
    tars("a name that is no UTF-8, and no label", tar(("caf\udce9.png", PNG)), refused="sample caf\\udce9…label"),
    tars("members apart", tar(("0.png", PNG), ("1.png", PNG), ("0.cls", b"a")), refused="sample 0…label"),
    tars("rows", tar(("0.json", b'{"n": 1, "label": "a"}')), refused="some.tar' has none of the files", contents="row"),
    Odd("documents", {
        "a.txt": b"\xef\xbb\xbfone", "b.txt": b"\xff\xfe", "c.txt": "", "d.TXT": "x\r\ny", "e": "z", ".f": "hidden",
        "g.csv": "text\nin a table\n",
    }, ["one", LEFT_OUT, "", "x\r\ny", "z", "in a table"], contents="language-modeling"),
]  # fmt: skip
TAGS = [
    tagged("names", {"tokens": ["a", "b"], "tags": ["O", "B-PER"]}, [("a b", ["O", "B-PER"])]),
    tagged("BOM", b"\xef\xbb\xbf" + lines({"tokens": ["a"], "tags": [" O"]}).encode(), [("a", ["O"])]),
    tagged("numbers", {"tokens": ["a", "b"], "tags": [0, 5]}, refused="line 1…tag 0, a number…tag_names"),
    tagged("numbers as texts", {"tokens": ["a"], "tags": ["0"]}, refused="line 1…tag 0, a number…tag_names"),
    tagged("named numbers", {"tokens": ["a", "b"], "tags": [0, "1"]},
        [("a b", ["O", "B-P"])], tag_names=["O", "B-P"]),
    tagged("a number without a name", {"tokens": ["a"], "tags": [2]},
        refused="line 1…tag 2…2 names", tag_names=["O", "P"]),
    tagged("a negative number", {"tokens": ["a"], "tags": [-1]}, refused="line 1…tag -1…2 names", tag_names=["O", "P"]),
    tagged("a null tag", {"tokens": ["a"], "tags": [None]}, refused="line 1…tag None…expected"),
    tagged("a prefix alone", {"tokens": ["a"], "tags": ["B-"]}, refused="line 1…'B-'…B-NAME"),
    tagged("a scheme without types", {"tokens": ["a", "b"], "tags": ["B", "I"]}, refused="line 1…'B'…B-NAME"),
    tagged("numbers of a scheme without types", {"tokens": ["a"], "tags": [1]}, refused="line 1…'I'…B-NAME",
           tag_names=["O", "I"]),
    tagged("a null token", {"tokens": ["a", None], "tags": ["O", "O"]}, refused="line 1…token None"),
    tagged("half of a pair", '{"tokens": ["\\ud83d"], "tags": ["O"]}\n', refused="line 1…'tokens'…UTF-8"),
    tagged("too few tags", {"tokens": ["a", "b"], "tags": ["O"]}, refused="line 1…2 tokens and 1 tags"),
    tagged("null", {"tokens": None, "tags": None}, refused="line 1…data.columns.tokens…nothing"),
    tagged("a span out of the text", {"text": "ab", "spans": [{"start": 0, "end": 9, "label": "X"}]},
        refused="line 1…0 to 9"),
    tagged("a span before it", {"text": "ab", "spans": [{"start": -2, "end": 2, "label": "X"}]},
        refused="line 1…-2 to 2"),
    tagged("an end of a line", {"text": "ab\u2028 cd", "spans": [{"start": 0, "end": 2, "label": "X"}]}, [
        ("ab\u2028 cd", ["B-X", "O"])]),
    Odd("tags: bytes", {"rows.parquet": parquet(tokens=[[b"a"]], tags=[["O"]])}, [("a", ["O"])], contents="tagged"),
    Odd("tags: bytes that are no text", {"rows.parquet": parquet(tokens=[[b"\xff"]], tags=[["O"]])},
        refused="row 1…'tokens'…UTF-8", contents="tagged"),
]  # fmt: skip
RECORDS = [
    record("a file, and none", "one.png,a,b\n,c,d\n", [({"image": PNG, "text": "a"}, "b"), ({"text": "c"}, "d")]),
    record("a file that is gone", "two.png,a,b\n", refused="rows.csv', row 1…image 'two.png'…expected a file"),
    record("a file that is no picture", "rows.csv,a,b\n", refused="rows.csv', row 1…the file 'rows.csv'…repair"),
    record("base64 in the cell", '"data:image/png;base64,iVBOR",a,b\n', refused="rows.csv', row 1…expected a file"),
    record("a protocol that is not known", "foo://x/y,a,b\n", refused="rows.csv', row 1…foo://x/y…expected a file"),
    record("a zero byte in a path", "a\0b.png,a,b\n", refused="rows.csv', row 1…expected a file"),
    record("a path that is no UTF-8", b"\xe9.png,a,b\n", refused="rows.csv', row 1…'image'…UTF-8"),
    record("a very long path", "x" * 5000 + ",a,b\n", refused="rows.csv', row 1…expected a file"),
    Odd("record: bytes with a path, as datasets writes pictures", {"r/rows.parquet": parquet(
        image=[{"bytes": PNG, "path": "x.png"}, {"bytes": None, "path": "one.png"}], text=["a", "c"], label=["b", "d"],
    ), "r/one.png": PNG}, [({"image": PNG, "text": "a"}, "b"), ({"image": PNG, "text": "c"}, "d")],
        contents="record", columns=FIELDS, source="r"),
    Odd("record: a list of bytes", {"rows.parquet": parquet(image=[[PNG]], text=["a"], label=["b"])},
        refused="row 1…'image'…a list…fields.image", contents="record", columns=FIELDS),
]  # fmt: skip
REPORTED = [
    csv("apache/arrow#51368", 'text,label\r\n"' + "z" * (2**21 - 2) + '\r\nB",x\r\nc,d\r\n', [
        ("z" * (2**21 - 2) + "\r\nB", "x"), ("c", "d"),
    ]),
    csv("apache/arrow#2883", HEAD + "\na,b\n", ONE),
    csv("pola-rs/polars#19078", HEAD + '"ABCDE FGHIJ\nKLMNOP",x\n' * 1041, [("ABCDE FGHIJ\nKLMNOP", "x")] * 1041),
    csv("pandas-dev/pandas#66415", HEAD + '"x\0y",a\n', [("x\0y", "a")]),
    csv("pandas-dev/pandas#47073", HEAD + '""malformed","quotes"",\n', refused="rows.csv', row 1…quote"),
    csv("pandas-dev/pandas#22374", "1,\n2, 1.23, 4.56\n3, 1.24, 4.57\n", refused="data.columns.label…rows.csv…it has 1",
        contents="row"),
    csv("pandas-dev/pandas#9294", "a,b,c,label\n0, 5, 9, 2\n1, 6, 4,,\n", refused="rows.csv', row 2…5 cells…4 columns",
        contents="row"),
    Odd("apache/spark#6411", {"a.parquet": parquet(text=["a"], label=["b"]),
        "_temporary/0/task/a.parquet": parquet(text=["a"], label=["b"])},
        refused="_temporary/0/task/a.parquet…unfinished job…remove"),
    Odd("delta-io/delta#489", {"a.parquet": parquet(text=["a"], label=["b"]), "_delta_log/00.json": "{}"},
        refused="Delta Lake…_delta_log/00.json…export"),
    Odd("Iceberg", {"t/data/a.parquet": parquet(text=["a"], label=["b"]), "t/metadata/v1.metadata.json": "{}"},
        refused="Iceberg…t/metadata/v1.metadata.json…export"),
    Odd("a log of Delta beside other tables", {"a.csv": HEAD + "a,b\n", "t/_delta_log/00.json": "{}"}, ONE,
        told="1 files…json"),
    Odd("apache/spark#11088", {"a.csv": "text\na\n", "_SUCCESS": "", "_committed_123": "{}", "b_$folder$": "",
        "_main.py": "x"}, ["x", "a"], contents="language-modeling", told="3 files are not read"),
    Odd("a pipe", {"a.csv": HEAD + "a,b\n", "b.csv": os.mkfifo}, refused="b.csv…a pipe…remove"),
    Odd("what only root may list", {"a.csv": HEAD + "a,b\n", "lost+found/b.csv": "x"}, ONE),
    csv("JuliaData/CSV.jl#54", "text;label\n1,1,10\n", refused="data.columns.input…text;label…write it with commas"),
    tars("ray-project/ray#44068", tar(("0.png", PNG), ("1.png", PNG), ("0.cls", b"a"), ("1.cls", b"b")),
         refused="sample 0…label…it has .png"),
    pictures("huggingface/datasets#5761", {"metadata.csv": "file_name,label\n1.png,a\n", "1.png": PNG},
             refused="1.png…CLASS/FILE"),
    jsonl("huggingface/datasets#7664", lines({"text": "action: string, datetime: timestamp[s], x", "label": "b"}), [
        ("action: string, datetime: timestamp[s], x", "b"),
    ]),
    jsonl("huggingface/datasets#3729", lines({"text": "a\u2028b\u0085", "label": "x"}), [("a\u2028b\u0085", "x")]),
]  # fmt: skip
"""Bug reports of other projects about such files."""
ODD = [*CSV, *JSONL, *TABLES, *NUMBERS, *FILES, *TAGS, *RECORDS, *REPORTED]
MESSAGES = [
    odd for odd in JSONL if odd.name != "json: another ending" and odd.contents == "text" and odd.name != "jsonl: empty"
]


def read(source: Path, odd: Odd) -> list[Any]:
    """Return what a task in memory reads. A row that it counts as unreadable is none of them, but a document."""
    config = DataConfig(source=str(source), columns=ColumnsConfig(**odd.columns), clean=CleanConfig(max_unreadable=1.0))
    if odd.contents == "language-modeling":
        rows = read_source(Source(str(source)), Documents().columns(config))
        return [text for some in rows for text in some.cells[INPUT].to_pylist()]
    if odd.contents == "tagged":
        kind = TaggedTexts()
        columns = kind.resolve(list_files(Source(str(source)), kind.contents), config.columns, None)
        given = config.model_copy(update={"columns": columns})
        return [
            (text, json.loads(tags))
            for rows in read_source(Source(str(source)), kind.columns(given))
            for text, tags in zip(kind.inputs(rows, given, verify=True), kind.labels(rows, given), strict=True)
        ]
    examples = read_examples(config, odd.contents)  # type: ignore[arg-type]
    return [LEFT_OUT if item is None else (natural(item, odd), label) for item, label in examples]


def natural(item: Any, odd: Odd) -> Any:
    if odd.contents == "row":
        # Which type a cell has depends on its neighbours. What it means does not.
        return {name: cell if cell is None else name_of(cell) for name, cell in json.loads(item).items()}
    if odd.contents == "record":
        return {name: base64.b64decode(cell) if name == "image" else cell for name, cell in json.loads(item).items()}
    return item


def expected(odd: Odd) -> list[Any]:
    if odd.contents == "row":
        return [({n: c if c is None else name_of(c) for n, c in row.items()}, label) for row, label in odd.read]
    return list(odd.read)


@pytest.mark.parametrize("unit_bytes", [units.WHOLE, TINY], ids=["whole", "cut"])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_an_odd_file_is_read_or_refused(
    odd: Odd, unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units, "WHOLE", unit_bytes)
    source = odd.write(tmp_path)
    if odd.refused:
        with pytest.raises(DataError, match=words(odd.refused, is_cut=unit_bytes == TINY)) as refusal:
            read(source, odd)
        assert len(str(refusal.value)) < 700
        assert "." in refusal.value.rule
        return
    assert read(source, odd) == expected(odd)
    told = capfd.readouterr()
    assert re.search(words(odd.told), told.out + told.err), told


@pytest.mark.parametrize("odd", MESSAGES, ids=lambda odd: odd.name)
def test_an_odd_message_is_read_as_a_line_is(odd: Odd) -> None:
    (content,) = odd.files.values()
    assert isinstance(content, bytes | str)
    content = content.encode() if isinstance(content, str) else content
    messages = [line for line in content.split(b"\n") if line.strip()]
    kept = [row for row in odd.read if row is not LEFT_OUT and row[0].strip() and row[1]]
    labels = list(dict.fromkeys([*(label for _, label in kept), "other", "another"]))
    stream = StreamConfig(labels=labels, max_bad=0.99)
    config = DataConfig(
        source="nats://host:1/S", stream=stream, validation_fraction=1e-9, clean=CleanConfig(deduplicate=False)
    )
    encoding = Encoding(Labelled("text", Classes), config, Classes(labels))
    rows = StreamRows(encoding, frozenset(), {0: 0}, is_first=False)
    rows.add([Message(0, number, line) for number, line in enumerate([*messages, b'{"text": "z", "label": "other"}'])])
    chosen = rows.choose(100, 1, takes_fewer=True)
    assert chosen is not None
    if odd.refused:
        assert chosen.report.dropped["malformed"]
        return
    (read,) = chosen.format.batches(chosen.train)
    texts = [text.strip() for text in read.cells[INPUT].to_pylist()]
    found = [*zip(texts, read.cells[LABEL].to_pylist(), strict=True)]
    assert found == [*((text.strip(), label) for text, label in kept), ("z", "other")]
    assert sum(chosen.report.dropped.values()) == len(messages) - len(kept)


def words(told: str, is_cut: bool = False) -> str:
    """Return a pattern of essential words. In a unit, a row is counted from a later byte or record batch."""
    pattern = ".*".join(re.escape(part) for part in told.split("…"))
    return re.sub(r"(row|line)\\ \d+", r"\1 \\d+( after byte| of record batch)?", pattern) if is_cut else pattern


def test_a_relative_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/a.csv").write_text(HEAD + "a,b\n")
    (tmp_path / "pictures/.x/a").mkdir(parents=True)
    (tmp_path / "pictures/.x/a/1.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    assert read_examples(DataConfig(source="tables")) == ONE
    assert read_examples(DataConfig(source="pictures/.x"), "image") == [(PNG, "a")]


def test_large_numbers_in_lists_stay_exact() -> None:
    row = parse_json(b'{"label": [123456789012345678901, {"x": -9223372036854775809}], "y": 1.5}', lambda: "here")
    assert row == {"label": [123456789012345678901, {"x": -9223372036854775809}], "y": 1.5}


def test_a_large_document_is_cut_into_the_same_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.sources.formats.files.MAX_DOCUMENT_BYTES", 10)
    text = "\ufeffa\n\ufeffb\r\n\u2028\ufeff\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    odd = Odd("", {}, contents="language-modeling")
    assert "".join(read(tmp_path, odd)) == text.removeprefix("\ufeff")


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's walk would skip it, with all rows of its class."""
    for name in ("a/1.png", "b/1.png", ".hidden/1.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(PNG)
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if path == str(tmp_path / "b") or ".hidden" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"Permission denied: '.*/b'"):
        read_examples(DataConfig(source=str(tmp_path)), "image")


def test_a_new_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = (ROOT / "CONTRIBUTING.md").read_text().partition("```python\n")[2].partition("```")[0]
    namespace: dict[str, Any] = {}
    exec(compile(example, "CONTRIBUTING.md", "exec"), namespace)
    monkeypatch.setitem(FORMATS, "fasttext", namespace["FastText"]())
    path = tmp_path / "films.ft"
    path.write_bytes("__label__good a fine film\n__label__bad a dull é\n".encode())
    assert read_examples(DataConfig(source=str(path))) == [("a fine film", "good"), ("a dull é", "bad")]
    (unit,) = units.cut_units(units.list_files(Source(str(path)), "text"), TINY)
    (rows,) = units.read_unit(unit, labelled_columns(ColumnsConfig(), "text"))
    assert rows.cells[INPUT].to_pylist() == ["a fine film", "a dull é"]
    path.write_bytes(b"__label__\xff a film\n")
    with pytest.raises(DataError, match=r"films\.ft', row 1: 'label' is not text in UTF-8"):
        read_examples(DataConfig(source=str(path)))
